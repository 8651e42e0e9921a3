"""How large pools are that `kvkeeper up` starts, on a stand-in of the device that the looking process finds in its Python."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.cache_service.config import SOURCE
from kvkeeper.cli import main
from kvkeeper.cli.start import up
from kvkeeper.cli.start.pool_size import FreeUnknown, find_free_bytes, find_pool_flags
from kvkeeper.common.service import memory_limit
from kvkeeper.common.service.process import StartError
from kvkeeper.engine_service import preflight
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR

MIB, GIB = 1 << 20, 1 << 30
ENGINE = EngineConfig(model=str(DEMO_MODEL_DIR), device="cuda")
WEIGHTS = preflight.model_memory(ENGINE).weights
_STAND_IN = """
from pathlib import Path
from kvkeeper.common.cuda import runtime
from tests.support.stand_ins.fake_cuda import FakeCuda
runtime.use_runtime(FakeCuda(Path({folder!r}), "look", capacity={capacity}, uuids={uuids}))
"""

SetDevice = Callable[..., int]


@pytest.fixture
def set_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetDevice:
    """Gives this machine a device with so much memory; returns what is free for pools."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    def put(capacity: int, uuids: tuple[str, ...] = ("ab" * 16,)) -> int:
        text = _STAND_IN.format(folder=str(tmp_path), capacity=capacity, uuids=uuids)
        (tmp_path / "sitecustomize.py").write_text(text)
        return capacity - 64 * MIB

    return put


def find(*argv: str, engine: EngineConfig = ENGINE) -> tuple[list[str], list[str]]:
    """Further flags, and what is said."""
    said: list[str] = []
    return find_pool_flags(argv, SOURCE.load(argv, os.environ), engine, said.append), said


def test_one_pool_takes_what_the_model_leaves_of_a_device(set_device: SetDevice) -> None:
    num_bytes = set_device(80 * GIB) * 9 // 10 - WEIGHTS - 3 * GIB
    flags, said = find("--device", "cuda")
    assert flags == ["--pool-memory", str(num_bytes), "--num-pools", "1"]
    assert said == [
        "one pool has 68.94 GiB: 90% of the 79.94 GiB that are free on cuda, less 7.629 MiB for weights and 3 GiB for graphs"
        " and steps; --pool-memory gives another size"
    ]


@pytest.mark.parametrize(("number", "said_of"), [("1", "one pool has 68.94 GiB: "), ("3", "3 pools have 22.98 GiB each: ")])
def test_a_number_of_pools_that_was_typed_stays(set_device: SetDevice, number: str, said_of: str) -> None:
    num_bytes = (set_device(80 * GIB) * 9 // 10 - WEIGHTS - 3 * GIB) // int(number)
    flags, said = find("--device", "cuda", "--num-pools", number)
    assert flags == ["--pool-memory", str(num_bytes), "--num-pools", number]
    assert said[0].startswith(said_of)


def test_each_rank_has_a_part_of_the_weights_and_no_graph_is_no_room(set_device: SetDevice) -> None:
    num_bytes = set_device(80 * GIB) * 9 // 10 - WEIGHTS // 2 - 2 * GIB
    engine = EngineConfig(model=str(DEMO_MODEL_DIR), device="cuda", tensor_parallel=2, graphs=False)
    assert find("--device", "cuda", engine=engine)[0][1] == str(num_bytes)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--device", "cuda", "--pool-memory", "256MiB"],
        ["--device", "cuda", "--num-blocks", "64"],
        ["--device", "cuda", "--num-blocks", "64", "--pool-memory", "80%"],
    ],
)
def test_what_was_typed_applies_and_no_device_is_looked_at(set_device: SetDevice, argv: list[str]) -> None:
    set_device(80 * GIB, uuids=())
    assert find(*argv) == ([], [])


def test_a_size_from_the_environment_applies(set_device: SetDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    set_device(80 * GIB, uuids=())
    monkeypatch.setenv("KVKEEPER_CACHE_POOL_MEMORY", "256MiB")
    assert find("--device", "cuda") == ([], [])


def test_a_share_of_a_device_is_divided_by_the_pools(set_device: SetDevice) -> None:
    num_bytes = set_device(80 * GIB) * 80 // 100 // 2
    flags, said = find("--device", "cuda:0", "--pool-memory", "80%")
    assert flags == ["--pool-memory", str(num_bytes), "--num-pools", "2"]
    sum_text = "80% of the 79.94 GiB that are free on cuda:0; --pool-memory gives another size"
    assert said == [f"2 pools have 31.97 GiB each: {sum_text}"]


def test_a_share_of_the_host_is_of_what_is_available() -> None:
    before = memory_limit.available_bytes()
    flags, said = find("--pool-memory", "50%", "--num-pools", "4")
    assert before / 2 < 8 * int(flags[1]) < 2 * before
    assert said[0].startswith("4 pools have ")
    assert "that are free on the host;" in said[0]


def test_without_a_device_the_default_stays_and_a_share_is_refused(set_device: SetDevice) -> None:
    set_device(80 * GIB, uuids=())
    why = "the free memory of cuda was not found: device_uuids: 0 CUDA devices are visible"
    assert find("--device", "cuda") == ([], [f"--pool-memory is 256 MiB for each pool: {why}"])
    with pytest.raises(StartError, match=f"^--pool-memory 80%: {why}$"):
        find("--device", "cuda", "--pool-memory", "80%")


def test_the_real_runtime_says_why_it_finds_none() -> None:
    with pytest.raises(FreeUnknown, match=r"^the free memory of cuda:90 was not found: .*[Cc][Uu][Dd][Aa]"):
        find_free_bytes("cuda:90")


def test_a_device_that_the_model_fills_leaves_the_default(set_device: SetDevice) -> None:
    set_device(3 * GIB + 512 * MIB)
    flags, (said,) = find("--device", "cuda")
    assert flags == []
    assert said.startswith("--pool-memory is 256 MiB for each pool: 90% of the 3.438 GiB that are free on cuda, less 7.629 MiB")
    assert said.endswith(" for graphs and steps, would be less")


def test_pools_that_are_kept_have_the_default(set_device: SetDevice) -> None:
    set_device(80 * GIB)
    flags, (said,) = find("--device", "cuda", "--memory-dir", "/x", "--hold", "unix:/h")
    assert (flags, said.partition(": ")[2]) == ([], "pools in --memory-dir keep one size from start to start")


class Started:
    """In the place of what runs the services."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def run(self, _: str) -> int:
        return 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[str]]]:
    """Flags of the services that `up` would have started."""
    flags: dict[str, list[str]] = {}

    def note(_: Any, given: dict[str, list[str]]) -> list[object]:
        flags.update(given)
        return []

    monkeypatch.setattr(up, "make_services", note)
    monkeypatch.setattr(up, "Together", Started)
    monkeypatch.setattr(preflight, "_GPU_FILES", ("null",))
    return flags


def test_up_hands_the_amount_to_the_service_and_says_it(
    set_device: SetDevice, started: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_device(80 * GIB)
    addresses = ["--cache-listen", f"unix:{tmp_path}/c", "--engine-listen", f"unix:{tmp_path}/e"]
    assert main(["up", *addresses, "--cache-device", "cuda", "--engine-device", "cuda"]) == 0
    config = SOURCE.load(started["cache"], {})
    assert (config.num_pools, config.pool_memory > 60 * GIB) == (1, True)
    assert capsys.readouterr().err.startswith("kvkeeper: one pool has 68.94 GiB: ")


def test_up_names_the_flag_of_a_share_that_cannot_be_had(
    set_device: SetDevice, started: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_device(80 * GIB, uuids=())
    addresses = ["--cache-listen", f"unix:{tmp_path}/c", "--engine-listen", f"unix:{tmp_path}/e"]
    assert main(["up", *addresses, "--cache-device", "cuda", "--pool-memory", "80%"]) == 1
    assert capsys.readouterr().err.startswith("kvkeeper: --pool-memory 80%: the free memory of cuda was not found: ")
    assert started == {}


def test_a_look_that_hangs_is_ended_and_told(set_device: SetDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_device(80 * GIB)
    (tmp_path / "sitecustomize.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr("kvkeeper.cli.start.pool_size._LOOK_S", 0.2)
    with pytest.raises(FreeUnknown, match=r"^the free memory of cuda was not found: .* timed out after 0.2 seconds$"):
        find_free_bytes("cuda")
