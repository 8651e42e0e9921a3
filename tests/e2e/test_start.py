"""The engine service as a process: configs that it refuses, and that its death leaves the cache warm."""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from kvkeeper.client import AsyncEngineClient
from kvkeeper.engine_service.__main__ import main
from kvkeeper.engine_service.config import SOURCE, ConfigError, EngineConfig
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.server import StartError, start_server
from tests.support.models.tiny_models import TINY_MODELS, build_model_folder
from tests.support.processes.engine_command import engine_process, ready
from tests.support.processes.service_pair import Services, generate, toy_output

RunMain = Callable[[list[str]], tuple[int, str]]
PROMPT = list(range(3, 16))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("models") / "tiny", TINY_MODELS[0])


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str]) -> Iterator[RunMain]:
    """Run main in this process: its exit code and what it printed."""

    def run(flags: list[str]) -> tuple[int, str]:
        code = main(["--listen", "127.0.0.1:0", *flags])
        return code, capsys.readouterr().err

    yield run
    structlog.reset_defaults()  # main sent the log to a stream that ends with this test


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--block-size", "0"], 2, "--block-size"),
        (["--block-size", "4.5"], 2, "--block-size"),
        (["--listen", "0.0.0.0:7411"], 2, "--listen"),
        (["--listen", "example.org:1"], 2, "--listen"),
        (["--listen", "unix:relative"], 2, "--listen"),
        (["--cache", "10.0.0.1:7410"], 2, "--cache"),
        (["--dtype", "int2"], 2, "--dtype"),
        (["--token-budget", "0"], 2, "--token-budget"),
        (["--model", "nowhere/at/all"], 1, "--model nowhere/at/all"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], code: int, text: str, run_main: RunMain) -> None:
    found, said = run_main(flags)
    assert found == code
    assert said.count("\n") == 1
    assert text in said


def test_a_truncated_weight_file_is_one_line(model_folder: Path, tmp_path: Path, run_main: RunMain) -> None:
    for file in model_folder.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    code, said = run_main(["--model", str(tmp_path), "--no-progress"])
    assert code == 1
    assert said.count("\n") == 1
    assert "model.safetensors" in said


def test_flags_go_over_environment_over_defaults() -> None:
    environ = {"KVKEEPER_ENGINE_CHUNK_SIZE": "8", "KVKEEPER_ENGINE_REFLECTION": "off", "KVKEEPER_ENGINE_LISTEN": ""}
    config = SOURCE.load(["--chunk-size", "4"], environ)
    assert (config.chunk_size, config.reflection, config.listen) == (4, False, "127.0.0.1:7411")
    assert SOURCE.load([], environ).chunk_size == 8
    with pytest.raises(ConfigError, match="KVKEEPER_ENGINE_THREADS: a number"):
        SOURCE.load([], {"KVKEEPER_ENGINE_THREADS": "all"})


async def test_a_device_that_torch_does_not_see_is_not_blamed_on_the_model(
    world: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(StartError, match=r"^--device cuda:1: torch sees no CUDA device here$"):
        await start_server(EngineConfig(model=str(DEMO_MODEL_DIR), device="cuda:1", listen=f"unix:{world.folder}/e"))


async def test_an_address_in_use_is_refused_while_its_owner_serves_on(world: Services) -> None:
    await world.start_cache()
    engine, by_port = await world.start_engine(), await world.start_engine(listen="127.0.0.1:0")
    for listen in (engine.address, by_port.address, world.cache.address):
        with pytest.raises(StartError, match=re.escape(f"--listen {listen}")):
            await world.start_engine(listen=listen)
    for owner in (engine, by_port):
        assert (await generate(await world.client(owner), PROMPT)).token_ids == [toy_output(PROMPT, 8)]


async def test_a_socket_of_a_live_process_is_refused_and_that_of_a_dead_one_taken(world: Services) -> None:
    await world.start_cache()
    listen = f"unix:{world.folder}/other"
    async with engine_process("--cache", world.cache.address, "--listen", listen) as process:
        await ready(process)
        with pytest.raises(StartError, match="another service listens"):
            await world.start_engine(listen=listen)
    engine = await world.start_engine(listen=listen)
    assert (await generate(await world.client(engine), PROMPT)).token_ids == [toy_output(PROMPT, 8)]


async def test_what_is_no_socket_is_left_alone(world: Services) -> None:
    await world.start_cache()
    (world.folder / "file").write_text("mine")
    with pytest.raises(StartError, match="not a socket"):
        await world.start_engine(listen=f"unix:{world.folder}/file")
    assert (world.folder / "file").read_text() == "mine"


async def test_a_killed_engine_leaves_a_warm_cache_and_no_sequence(world: Services) -> None:
    await world.start_cache()
    listen = f"unix:{world.folder}/other"
    async with AsyncEngineClient(listen) as client:
        async with engine_process("--cache", world.cache.address, "--listen", listen) as process:
            await ready(process)
            first = await generate(client, PROMPT)
            assert first.usage.cached_tokens == 0
            process.send_signal(signal.SIGKILL)
            await process.wait()
        pool = await world.wait_idle()
        assert pool.num_quarantined_blocks == 0
        async with engine_process("--cache", world.cache.address, "--listen", listen) as process:
            await ready(process)
            again = await generate(client, PROMPT)
            assert again.usage.cached_tokens == 12
            assert again.token_ids == first.token_ids == [toy_output(PROMPT, 8)]
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    left = {path.name for path in world.folder.iterdir()}
    assert not {name for name in left if name.startswith("other")}
