"""A fault in one request ends that request with a typed error, and no other; a bug in the loop ends all of them at once."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvkeeper.client import AsyncEngineClient, BeamSearch, CallOptions, GenerateOptions, KvkeeperError, Sampling, transport
from kvkeeper.client.engine.calls import generate_request
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from kvkeeper.engine_service import server
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.outputs.model_text import ModelText
from kvkeeper.engine_service.scheduler.scheduler import Scheduler
from kvkeeper.engine_service.serving import stream_buffer
from tests.support.models.odd_models import NAN_TOKEN, odd_model
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model
from tests.support.processes.service_pair import BLOCK_SIZE, GREEDY, Services, generate, toy_output, until, until_stats
from tests.support.worlds.cache_api import failure

pytestmark = pytest.mark.in_turn

PROMPT = "def main():\n    "
FREE = Sampling(temperature=0, repetition_penalty=1.0, ignore_eos=True)


async def has_tokens(client: AsyncEngineClient) -> bool:
    return (await client.stats()).num_new_tokens > 0


async def test_a_client_that_stops_reading_loses_its_request_and_holds_nothing(
    world: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More is generated than the connection buffers, while another client gets everything it asked for."""
    monkeypatch.setattr(stream_buffer, "MAX_UNREAD", 4000)
    no_large_windows = ("grpc.http2.bdp_probe", 0)
    monkeypatch.setattr(transport, "_CHANNEL_OPTIONS", (*transport._CHANNEL_OPTIONS, no_large_windows))
    await world.start_cache(num_blocks=1024)
    engine = await world.start_engine(fronts=0)  # whose limit is changed
    client = await world.client(engine)
    much = Sampling(max_tokens=300, temperature=0, repetition_penalty=1.0, num_logprobs=20)
    own = transport.AsyncTransport(engine.address, CallOptions(), pb_grpc.EngineServiceStub)
    world.defer(own.close)
    stuck = own.stream(own.stub.Generate, generate_request([7, 8, 9], GenerateOptions(n=4, sampling=much)))
    await anext(stuck)
    good = await generate(client, [1, 2], 40)

    async def has_ended() -> bool:
        stats = await client.stats()
        return stats.num_failed_requests + stats.num_completed_requests == 2

    await until(has_ended)
    assert (await world.wait_idle()).num_referenced_blocks == 0, "while it still does not read"
    assert good.token_ids == [toy_output([1, 2], 40)]
    read = []
    with pytest.raises(KvkeeperError) as ended:  # noqa: PT012
        async for chunk in stuck:
            read += chunk.token_ids
    assert (ended.value.code, ended.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NOT_READ")
    assert ended.value.metadata == {"limit": "4000"}
    assert 0 < len(read) < 4 * 300


async def test_a_grammar_that_breaks_while_it_runs_ends_its_request_alone(
    world: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvkeeper.engine_service.outputs.constraint import Constraint

    allowed = Constraint.allowed
    num_calls = 0

    def break_later(constraint: Constraint) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("no such state: 'secret'")
        return allowed(constraint)

    monkeypatch.setattr(Constraint, "allowed", break_later)
    await world.start_cache()
    model = load_served_model(EngineConfig(model=str(DEMO_MODEL_DIR), progress=False))
    client = await world.client(await world.start_engine(model, block_size=16))
    expected = await generate(client, PROMPT, 60, FREE)
    before = (await client.stats()).num_new_tokens
    good = asyncio.create_task(generate(client, PROMPT, 60, FREE))

    await until_stats(client, lambda stats: stats.num_new_tokens > before)
    failed = await failure(generate(client, PROMPT, 60, Sampling(regex="[a-z]{50}", seed=1)))
    assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "REQUEST_FAILED")
    assert "secret" not in failed.message
    assert num_calls == 3
    assert (await good).token_ids == expected.token_ids
    assert (await world.wait_idle()).num_referenced_blocks == 0


@pytest.mark.parametrize(
    "wanted",
    [
        {"n": 3},
        {"n": 2, "best_of": 3},
        {"n": 1, "beam_search": BeamSearch(num_beams=3)},
        {"num_logprobs": 2},
        {"num_prompt_logprobs": 2},
    ],
    ids=lambda wanted: "-".join(wanted),
)
@pytest.mark.parametrize("place", [1, 5])
async def test_logits_that_are_not_finite_end_their_request_alone(world: Services, wanted: dict[str, Any], place: int) -> None:
    """Where the prompt is computed in chunks, and in its first one or its last."""
    client = await world.serve(odd_model(), chunk_size=4)
    good = asyncio.create_task(generate(client, [1, 2, 3], 80))
    await until(lambda: has_tokens(client))
    prompt = [4, 5, 6, 7, 8, 9]
    prompt[place] = NAN_TOKEN
    sampling = dataclasses.replace(GREEDY, max_tokens=8, **{key: wanted[key] for key in wanted if "logprobs" in key})
    options = GenerateOptions(sampling=sampling, **{key: wanted[key] for key in wanted if "logprobs" not in key})
    with pytest.raises(KvkeeperError) as failed:
        _ = [chunk async for chunk in client.generate(prompt, options)]
    assert (failed.value.code, failed.value.reason) == (grpc.StatusCode.INTERNAL, "REQUEST_FAILED")
    assert (await good).token_ids == [toy_output([1, 2, 3], 80)]
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_blocks_behind_logits_that_are_not_finite_are_not_shared(world: Services) -> None:
    client = await world.serve(odd_model())
    assert (await failure(generate(client, [*range(1, 40), NAN_TOKEN], 8))).reason == "REQUEST_FAILED"
    assert (await world.wait_idle()).num_indexed_blocks == 0
    await generate(client, list(range(1, 40)), 8)
    assert (await world.wait_idle()).num_indexed_blocks > 0


@pytest.mark.parametrize("is_slow", [False, True])
async def test_guesses_that_cannot_be_had_are_gone_without(
    world: Services, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    class Broken:
        num_asked = 0

        def propose(self, *_: object) -> dict[int, Any]:
            Broken.num_asked += 1
            raise RuntimeError("a bug in the draft")

    Broken.is_slow = is_slow  # type: ignore[attr-defined]
    monkeypatch.setattr(server, "PromptLookUp", Broken)
    client = await world.serve(speculation="prompt-look-up")
    assert (await generate(client, [1, 2, 3], 20)).token_ids == [toy_output([1, 2, 3], 20)]
    assert Broken.num_asked > 0


async def test_text_that_fails_when_it_is_cancelled_is_cancelled_all_the_same(world: Services) -> None:
    class Broken:
        has_text = True

        def push(self, token_id: int) -> tuple[str, bool]:
            return "", False

        def flush(self) -> str:
            raise ValueError("half a character")

    class Text:
        tokenizer = None

        no_output = staticmethod(ModelText(None).no_output)

        def output(
            self, prompt: list[int], stops: tuple[str, ...], min_tokens: int, keep_special_tokens: bool = False
        ) -> Broken:
            return Broken()

    await world.start_cache()
    model = dataclasses.replace(odd_model(), text=Text())  # type: ignore[arg-type]
    client = await world.client(await world.start_engine(model, fronts=0))  # its text is made in this process
    long = GenerateOptions(request_id="mine", n=2, sampling=dataclasses.replace(GREEDY, max_tokens=150))
    generation = client.generate([1, 2, 3], long)
    await anext(generation)
    await client.cancel("mine")
    reasons = [chunk.finish_reason async for chunk in generation if chunk.finish_reason]
    assert reasons == ["cancelled", "cancelled"]
    left = client.generate([1, 2, 3], long)
    await anext(left)
    left.close()
    assert (await world.wait_idle()).num_referenced_blocks == 0
    assert (await client.stats()).num_cancelled_requests == 2


async def test_log_probabilities_of_a_long_prompt_hold_up_no_other_request(world: Services, tmp_path: Path) -> None:
    model = load_served_model(
        EngineConfig(model=str(build_model_folder(tmp_path, tiny_model("llama"))), progress=False, block_size=BLOCK_SIZE)
    )
    client = await world.serve(model, chunk_size=32, cache={"num_blocks": 200})
    prompt = [int(token) for token in random_tokens(min(model.max_len - 4, 600), seed=3)]
    alone = await generate(client, prompt[:5], 40, FREE)
    short = asyncio.create_task(generate(client, prompt[:5], 40, FREE))
    scored = client.generate(prompt, GenerateOptions(sampling=dataclasses.replace(FREE, max_tokens=2, num_prompt_logprobs=20)))
    chunks = [chunk async for chunk in scored]
    found = [one for chunk in chunks for one in chunk.prompt_logprobs]
    assert [one.token_id for one in found] == prompt[1:]
    assert all(len(one.top) == 20 for one in found)
    assert (await short).token_ids == alone.token_ids
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_a_bug_in_the_loop_ends_every_request_at_once(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    client = await world.client(engine)
    crowd = [asyncio.create_task(generate(client, [place, 7], 200)) for place in range(1, 4)]
    await until(lambda: has_tokens(client))

    def broken(*_: object) -> None:
        raise IndexError("a bug of ours")

    monkeypatch.setattr(Scheduler, "apply", broken)
    for ended in await asyncio.gather(*crowd, return_exceptions=True):
        assert isinstance(ended, KvkeeperError)
        assert (ended.code, ended.reason) == (grpc.StatusCode.INTERNAL, "BROKEN_INVARIANT")
        assert "bug of ours" not in ended.message
    with pytest.raises(IndexError):
        await engine.wait_end()
    assert (await failure(generate(client, [1]))).reason == "DRAINING"
