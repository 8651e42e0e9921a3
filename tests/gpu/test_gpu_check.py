"""gpu-check itself, as far as it goes without a device: failed parts, the results file, and a rehearsal."""

import asyncio
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from kvkeeper.engine_service.config import SOURCE
from tests.gpu import kernel_workers, part_serving, spoil
from tests.gpu.__main__ import MACHINE, PARTS, _run_all
from tests.gpu.bundle import ROOT, _requirements, install, without_weights
from tests.gpu.checks import LOGS_VARIABLE, Check, PartResult, read_checks, write_result
from tests.gpu.part_machine import PARTS_THAT_NEED
from tests.gpu.peer import Peer, PeerFailed
from tests.gpu.random_model import TINY, write_model
from tests.gpu.same_tokens import NEAR_TIE, Output, judge
from tests.support.processes.services import environment

GOOD, FINDING, BAD = Check("a", True, {"ms": 1.5}), Check("b", None, note="told"), Check("c", False)


@pytest.mark.parametrize(
    ("checks", "problem", "is_good"),
    [
        ([GOOD, FINDING], "", True),
        ([GOOD, BAD], "", False),
        ([GOOD], "took longer than 60 s", False),
        ([], "", False),  # a part that found nothing has not run
    ],
)
def test_the_checks_that_make_a_part_fail(checks: list[Check], problem: str, is_good: bool) -> None:
    assert PartResult("x", 1.0, checks, problem).is_good is is_good


def test_checks_of_a_part_before_it_broke_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert read_checks(path) == []
    write_result(path, PartResult("a", 1.0, [GOOD], "it has not ended"))
    write_result(path, PartResult("a", 1.0, [GOOD, FINDING], "it has not ended"))
    assert read_checks(path) == [GOOD, FINDING]
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_rehearsal_writes_a_file_and_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--dry", "--parts", "a", "--results", str(tmp_path)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    files = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(files) == {"m.json", "a.json"}
    assert {file["problem"] for file in files.values()} == {""}
    names = [check["name"] for check in files["a.json"]["checks"]]
    assert {"ipc_both_ways", "ipc_exporter_killed", "ipc_importer_killed", "ipc_stale_handle", "vmm_maker_killed"} <= set(names)
    assert "no parts failed" in done.stdout
    assert (tmp_path / "logs" / "a" / "part.log").exists()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As a rehearsal has it, see tests.gpu.__main__."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_free_memory_is_spoiled_and_what_a_tensor_or_a_graph_has_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, given = torch.zeros(64, dtype=torch.uint8), []
    blocks = [(0, 8, "inactive"), (8, 16, "active_allocated"), (24, 8, "active_pending_free"), (32, 8, "inactive")]
    told = [{"address": address, "size": size, "state": state} for address, size, state in blocks]
    segments = [{"segment_pool_id": (0, 0), "device": 1, "blocks": told}]
    for pool, device in (((1, 0), 1), ((0, 0), 0)):  # of a graph, and of another device
        other = {"address": 48, "size": 16, "state": "inactive"}
        segments.append({"segment_pool_id": pool, "device": device, "blocks": [other]})
    monkeypatch.setattr(spoil, "tensor_at", lambda address, size: memory[address : address + size])
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(int(memory.sum())))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    assert spoil.spoil_freed(torch.device("cuda", 1)) == 16
    assert memory.nonzero().flatten().tolist() == [*range(8), *range(32, 40)]
    assert given == [16 * 255, 16 * 255], "given back once all was written"


@pytest.mark.usefixtures("one_thread")
def test_kernels_and_a_models_steps_are_rehearsed_without_a_device() -> None:
    """Each check as the part yields it; some 16 seconds of a processor."""
    for part, some in (
        (
            "b",
            {
                "decode_shared_prefix",
                "experts_int4_few",
                "float8_16",
                "integers_int8_far",
                "latent_decode_far",
                "latent_prefill_short_suffix",
                "quantise_rows_far",
                "rotary_store_kv_far",
                "store_latent_far",
                "stored_decode_shared_prefix_int4",
                "stored_prefill_short_suffix_fp8",
                "stored_store_int4_far",
            },
        ),
        (
            "g",
            {
                "logits_deepseek_v3",
                "graph_gpt_oss",
                "graph_logits_fp8_1",
                "graph_logits_int4_1",
                "graph_penalised_4",
                "graph_shared_prefix",
                "profile_plain_1",
            },
        ),
    ):
        checks = list(import_module(PARTS[part][0]).run(True))
        assert [check for check in checks if check.ok is False] == []
        assert some <= {check.name.removesuffix("_float32") for check in checks}


def test_both_services_are_rehearsed_their_tokens_compared_and_their_logs_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One size of the two ways whose tokens are compared, which is what a rehearsal of the part begins with."""
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setenv(LOGS_VARIABLE, str(logs))
    model, outputs = write_model(tmp_path, TINY, "cpu"), dict[tuple[str, ...], list[Output]]()
    for ways in (part_serving._DEFAULT, part_serving._PLAIN):
        (check,) = asyncio.run(part_serving._serve(model, TINY, "cpu", (2,), 16, ways, outputs))
        assert check.figures["tokens_per_s"] > 0
    assert part_serving._same_tokens("same", outputs).ok
    services = [path.name.partition("-")[2] for path in sorted(logs.iterdir())]
    assert services == 2 * ["cache_service.log", "engine_service.log"]
    assert all("ready" in path.read_text() for path in logs.iterdir())
    shown = outputs[part_serving._PLAIN][0]
    # Two tokens may be equally likely, to the bit in few bits: any of them is right.
    assert all(told[token] == max(told.values()) for token, told in zip(shown.token_ids, shown.likeliest, strict=True))


def test_every_way_of_serving_is_another_one_and_the_first_is_the_default() -> None:
    ways = [*part_serving._WAYS, *part_serving._OTHER_WAYS, part_serving._TWO_RANKS]
    configs = [SOURCE.load(flags, {}) for flags in ways]
    assert configs[0] == SOURCE.load([], {})
    assert not [ways[at] for at, config in enumerate(configs) if config in configs[:at]]


def outputs(*texts: list[int]) -> list[Output]:
    """With token 7 always the likeliest, 8 within a near tie of it, and 9 beyond one."""
    return [Output(text, [{7: -1.0, 8: -1.0 - NEAR_TIE / 2, 9: -1.0 - NEAR_TIE * 2}] * len(text)) for text in texts]


@pytest.mark.parametrize(
    ("found", "is_ok"),
    [
        ([[7, 7, 7], [7, 7, 7], [7, 7, 7]], True),
        ([[7, 8, 3], [7, 7, 7], [7, 7, 7]], True),  # what follows a near tie is another text
        ([[7, 9, 7], [7, 7, 7], [7, 7, 7]], False),
        ([[7, 7, 4], [7, 7, 7], [7, 7, 7]], False),  # not among the likeliest
        ([[7, 7], [7, 7, 7], [7, 7, 7]], False),
        ([[8, 7, 7], [7, 8, 7], [7, 7, 8]], False),  # near ties all, but too many of them
    ],
)
def test_tokens_that_part_are_judged(found: list[list[int]], is_ok: bool) -> None:
    assert judge("same", outputs(*found), outputs(*[[7, 7, 7]] * 3)).ok is is_ok


def test_tokens_of_a_service_that_did_not_start_are_no_tokens() -> None:
    check = part_serving._same_tokens("same", {part_serving._DEFAULT: outputs([7])})
    assert (check.ok, check.note) == (False, "no tokens of -no-graphs-no-overlap")


def test_a_machine_that_will_not_do_stops_the_run_with_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--parts", "ab", "--results", str(tmp_path)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("this machine cannot run the checks: ")
    assert "no CUDA device is visible to torch" in done.stderr
    assert [path.name for path in tmp_path.glob("*.json")] == ["m.json"]


def run_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: dict[str, str], limit_s: int, seconds: float
) -> tuple[list[PartResult], list[str]]:
    """The parts of files in a folder, a module each; the machine's among them."""
    for name, text in modules.items():
        (tmp_path / f"stand_in_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{environment(tmp_path)['PYTHONPATH']}")
    parts = {name: (f"stand_in_{name}", limit_s, name) for name in modules}
    (tmp_path / "run_stand_ins.py").write_text(
        f"import tests.gpu.__main__ as main\nmain.PARTS.clear()\nmain.PARTS.update({parts})\n"
    )
    monkeypatch.setattr("tests.gpu.__main__.PARTS", parts)
    monkeypatch.setattr(
        "tests.gpu.__main__._COMMAND", [sys.executable, "-c", "import run_stand_ins; run_stand_ins.main.main()"]
    )
    (tmp_path / "logs").mkdir()
    return _run_all(list(modules), tmp_path, True, seconds)


OK = "from tests.gpu.checks import Check\ndef run(is_dry):\n    yield Check('fine', True)\n"


def test_a_part_that_hangs_is_killed_and_what_it_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = OK + "    import signal; signal.pause()\n"
    results, left = run_parts(tmp_path, monkeypatch, {MACHINE: OK, "a": hangs, "b": OK}, 8, 600)
    assert [(result.part, len(result.checks), result.problem) for result in results] == [
        (MACHINE, 1, ""), ("a", 1, "took longer than 8 s"), ("b", 1, "")]  # fmt: skip
    assert left == []


def test_a_part_that_breaks_says_so_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = OK + "    raise ValueError('as planned')\n"
    results, _ = run_parts(tmp_path, monkeypatch, {MACHINE: OK, "a": breaks, "b": OK}, 60, 600)
    assert results[1].problem == "ended with 1: raise ValueError('as planned') | ValueError: as planned"
    assert [len(result.checks) for result in results] == [1, 1, 1]


def test_parts_that_have_too_little_time_are_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, left = run_parts(tmp_path, monkeypatch, {MACHINE: OK, "a": OK}, 60, 5)
    assert (results, left) == ([], [MACHINE, "a"])


def test_a_part_that_the_time_ends_keeps_what_it_found_and_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.__main__._LEAST_S", 1)
    hangs = OK + "    import signal; signal.pause()\n"
    results, left = run_parts(tmp_path, monkeypatch, {MACHINE: OK, "a": hangs, "b": OK}, 60, 4)
    assert [(result.part, len(result.checks)) for result in results] == [(MACHINE, 1), ("a", 1)]
    assert left == ["a", "b"]


@pytest.mark.parametrize("name", PARTS_THAT_NEED)
def test_what_some_parts_need_leaves_out_those_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = f"from tests.gpu.checks import Check\ndef run(is_dry):\n    yield Check('{name}', False)\n"
    barred = set(PARTS_THAT_NEED[name])
    modules = {MACHINE: lacks} | dict.fromkeys([part for part in PARTS if part != MACHINE], OK)
    results, left = run_parts(tmp_path, monkeypatch, modules, 60, 600)
    assert [result.part for result in results] == [part for part in modules if part not in barred]
    assert left == []


def test_a_case_that_ends_its_process_is_one_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that lost the device is replaced, too; one that ends between two cases is not, because the next would."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\n"
        "share, shares, first = map(int, sys.argv[1:4])\n"
        "for number in range(first, 5):\n"
        "    print(json.dumps({'number': number, 'name': f'case_{number}'}), flush=True)\n"
        "    if number == 1: os._exit(134)\n"
        "    print(json.dumps({'check': {'name': f'case_{number}', 'ok': number != 2}}), flush=True)\n"
        "    if number == 2: sys.exit(3)\n"
        "sys.exit(7)\n"
    )
    monkeypatch.setattr(kernel_workers, "_COMMAND", (sys.executable, str(worker)))
    checks = list(kernel_workers.run_cases(True))
    assert [check.name for check in checks] == [*(f"case_{number}" for number in range(5)), "worker_0"]
    assert [check.ok for check in checks] == [True, False, False, True, True, False]
    assert "134" in checks[1].note and "7" in checks[-1].note


def test_a_peer_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.gpu.peer.CALL_S", 0.0)
    with Peer(tmp_path) as peer, pytest.raises(PeerFailed, match="allocate gave no answer within 0 s"):
        peer.call("allocate", num_bytes=1)


def test_a_bundle_is_unpacked_without_pip_and_only_for_its_python(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    wheel = folder / "thing-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("thing/__init__.py", "")
        packed.writestr("thing/model.safetensors", "weights")
    without_weights(wheel)
    (folder / "python").write_text("{}.{}\n".format(*sys.version_info))
    install(folder, tmp_path / "site")
    assert [path.name for path in (tmp_path / "site" / "thing").iterdir()] == ["__init__.py"]
    (folder / "python").write_text("2.7\n")
    with pytest.raises(SystemExit, match=r"the bundle is for Python 2\.7"):
        install(folder, tmp_path / "site")


def test_every_part_exists() -> None:
    for module, limit_s, _ in PARTS.values():
        assert callable(import_module(module).run)
        assert limit_s > 0


def test_the_commands_of_the_page_run_all_parts_within_ten_minutes_each() -> None:
    page = (ROOT / "docs" / "operate" / "gpu.md").read_text()
    limits = {name: int(seconds) for name, seconds in re.findall(r"^\| ([a-z]) \| (\d+) \|", page, re.MULTILINE)}
    assert limits == {name: limit_s for name, (_, limit_s, _) in PARTS.items()}
    commands = re.findall(r"^make gpu-check \S+ PARTS=(\w+) ", page, re.MULTILINE)
    assert {MACHINE, *"".join(commands)} == set(PARTS)
    for together in commands:
        assert sum(PARTS[name][1] for name in {MACHINE, *together}) <= 9.5 * 60, together


def test_the_bundle_leaves_the_hosts_own_packages_alone() -> None:
    names = [requirement.split(">")[0].split("=")[0] for requirement in _requirements()]
    assert {"grpcio", "protobuf", "llguidance"} <= set(names)
    assert not {"torch", "triton", "numpy"} & set(names)
