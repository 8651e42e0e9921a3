"""A chat template is a program of the model folder: one that loops holds up no stream, no time-out and no end of the engine."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.client import AsyncEngineClient, CallOptions, GenerateOptions, KvkeeperError, Sampling
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.processes.fleet import DEADLINE_S, Fleet, fleet

CHAT = [{"role": "user", "content": "hello"}]
FREE = Sampling(max_tokens=64, temperature=0, ignore_eos=True)
LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


def templated(folder: Path, template: str) -> Path:
    """The demo model with another chat template."""
    folder.mkdir()
    for file in DEMO_MODEL_DIR.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").symlink_to(DEMO_MODEL_DIR / "model.safetensors")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder


async def read(client: AsyncEngineClient, prompt: Any, **options: Any) -> list[int]:
    """The tokens of one request."""
    chunks = client.generate(prompt, GenerateOptions(sampling=FREE, **options))
    return [token async for chunk in chunks for token in chunk.token_ids]


async def refused(awaited: Any) -> KvkeeperError:
    with pytest.raises(KvkeeperError) as error:
        async with asyncio.timeout(DEADLINE_S):
            await awaited
    return error.value


async def ended(services: Fleet) -> list[int]:
    for service in (*services.engines, services.cache):
        service.terminate()
    return [await service.end() for service in (*services.engines, services.cache)]


async def test_a_template_that_loops_holds_up_its_own_chats_alone(tmp_path: Path) -> None:
    """text_seconds is so long that it is not what ends the loop."""
    model = templated(tmp_path / "looping", LOOP)
    engine = {"model": str(model), "block_size": 16, "text_seconds": 600}
    async with fleet(1, {"num_blocks": 256}, **engine) as services:
        address, options = services.engine_addresses[0], CallOptions(timeout_s=DEADLINE_S, retry_s=0)
        async with AsyncEngineClient(address, options) as client, AsyncEngineClient(address, options) as looping:
            timed_out = await refused(read(looping, CHAT, timeout_ms=400))
            assert (timed_out.reason, timed_out.metadata["timeout_ms"]) == ("TIMED_OUT", "400")
            submitted = await refused(looping.submit(CHAT, GenerateOptions(sampling=FREE, timeout_ms=400)))
            assert submitted.reason == "TIMED_OUT"
            chat = asyncio.create_task(read(looping, CHAT))
            assert len(await read(client, "import os\n")) == FREE.max_tokens
            assert len(await client.tokenize("import os\n")) > 0
            assert not chat.done()
            codes = asyncio.create_task(ended(services))
            assert (await refused(chat)).reason == "DRAINING"
        assert await codes == [0, 0]


async def test_a_template_that_recurses_is_refused_and_the_engine_serves_on(tmp_path: Path) -> None:
    source = "{% macro f(m) %}{{ f(m) if m.content == 'hello' else m.content }}{% endmacro %}{{ f(messages[0]) }}"
    model = templated(tmp_path / "recursive", source)
    async with fleet(1, {"num_blocks": 256}, model=str(model), block_size=16) as services:
        options = CallOptions(timeout_s=DEADLINE_S, retry_s=0)
        async with AsyncEngineClient(services.engine_addresses[0], options) as client:
            error = await refused(read(client, CHAT))
            assert (error.reason, error.metadata) == ("TOO_COMPLEX", {"field": "chat", "exceeded": "depth"})
            assert await read(client, [{"role": "user", "content": "other"}]) == await read(client, "other")
        assert await ended(services) == [0, 0]
        assert not [event for service in services.engines for event in service.events if event == "broken_invariant"]
