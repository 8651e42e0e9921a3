"""`tests.benchmarks.tier_hits`: each hit counts for the tier that the block lay in, and everything that moves is reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.cli.benchmark import traces
from tests.benchmarks.tier_hits import main

# A device of three blocks holds one request with its computed token, and the host tier two.
REQUESTS = [[1, 2], [1, 3], [4, 5], [1, 3], [6, 7], [8, 9], [10, 11], [4, 5]]
SIZES = ("--policy", "lru", "--blocks", "3", "--host-blocks", "4", "--disk-blocks", "20")


def write(path: Path, requests: list[list[int]]) -> str:
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in requests))
    return str(path)


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    return {**report, "results": {row["tiers"]: row for row in report["results"]}}


def test_hits_count_for_the_tier_that_had_the_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, write(tmp_path / "t", REQUESTS), *SIZES)
    infinite = found["infinite_hit_rate"]
    assert infinite == round(5 / 16, 4)  # 1, then 1 and 3, then 4 and 5
    device, host, disk = (found["results"][name] for name in ("device", "device, host", "device, host, disk"))
    assert device["hit_rates"] == {"device": round(1 / 16, 4), "host": 0, "disk": 0}
    assert host["hit_rates"] == {"device": round(1 / 16, 4), "host": round(2 / 16, 4), "disk": 0}
    assert disk["hit_rates"] == {"device": round(1 / 16, 4), "host": round(2 / 16, 4), "disk": round(2 / 16, 4)}
    assert disk["hit_rate"] == infinite
    assert disk["of_infinite"] == 1
    assert device["moved_blocks"] == dict.fromkeys(device["moved_blocks"], 0)
    assert disk["moved_blocks"]["disk_to_host"] == 2
    assert disk["moved_blocks"]["host_to_device"] == 4
    assert disk["moved_blocks"]["host_to_disk"] >= 7


def test_tiers_that_hold_everything_hit_what_an_infinite_cache_hits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t", traces.generate(5, 300))
    found = rows(capsys, trace, "--blocks", "250", "--host-blocks", "500", "--disk-blocks", "20000")
    shares = [row["of_infinite"] for row in found["results"].values()]
    assert shares[0] < shares[1] < 0.99 < shares[2] <= 1
    second = rows(capsys, trace, "--blocks", "250", "--host-blocks", "500", "--disk-admit", "second-use")
    assert second["results"]["device, host, disk"]["moved_blocks"]["host_to_disk"] < 300


def test_bytes_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "tiers.png"
    found = rows(capsys, write(tmp_path / "t", REQUESTS), *SIZES, "--block-memory", "2MiB", "--plot", str(picture))
    assert found["results"]["device, host, disk"]["moved_memory"]["disk_to_host"] == "4 MiB"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["missing.jsonl"], "missing.jsonl cannot be read: No such file or directory"),
        (["--policy", "best"], "--policy: one of adaptive, "),
        (["--blocks", "3"], "--blocks 3 do not hold the longest request of the trace, of "),
    ],
)
def test_wrong_usage_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith(f"kvkeeper: {said}")
