"""`tests.benchmarks.peers`: systems take turns at the same prompts, medians are over rounds, and what is missing is said."""

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks.peers import environments
from tests.benchmarks.peers.__main__ import choose, measure
from tests.benchmarks.peers.rounds import figure, take_turns, turn_of
from tests.benchmarks.peers.systems import Ended, Running, System
from tests.benchmarks.peers.table import tables
from tests.benchmarks.peers.workloads import WORKLOADS, Workload, jobs

# Writes its name for each job; its chunks come 0.1 s apart, by what it says.
FAKE = """
import json, sys
name, record = sys.argv[1:]
print(json.dumps({"ready_s": 1.5}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    with open(record, "a") as file:
        print(name, len(job["prompts"]), job["num_new"], file=file)
    times = [(place + 1) / 10 for place in range(job["num_new"])]
    tokens = [5] * job["num_new"]
    print(json.dumps({"times": [times for _ in job["prompts"]], "tokens": [tokens for _ in job["prompts"]]}), flush=True)
"""
SHARED = Workload("shared", 2, 8, 4, 3)


def system(name: str, record: Path, *, shares_prefixes: bool = True) -> System:
    return System(name, "fp32", [sys.executable, "-c", FAKE, name, str(record)], shares_prefixes=shares_prefixes)


def test_systems_take_turns_and_the_first_round_does_not_count(tmp_path: Path) -> None:
    running = [Running(system(name, tmp_path / "record"), tmp_path / f"{name}.log") for name in "AB"]
    num_ticks = 0

    def tick() -> None:
        nonlocal num_ticks
        num_ticks += 1

    found = list(take_turns(running, SHARED, 2, tick))
    for each in running:
        each.end()
    assert [each.ready_s for each in running] == [1.5, 1.5]
    assert [(row["system"], row["rounds"]) for row in found] == [("A", 2), ("B", 2)]
    assert num_ticks == 6
    lines = (tmp_path / "record").read_text().splitlines()
    assert lines == [f"{name} {job}" for name in "ABABAB" for job in ("1 1", "2 3")]  # what is shared goes before


def test_a_system_that_shares_no_prefixes_is_left_out_with_a_sentence(tmp_path: Path) -> None:
    one = Running(system("A", tmp_path / "record"), tmp_path / "log")
    other = Running(system("B", tmp_path / "record", shares_prefixes=False), tmp_path / "log")
    found = list(take_turns([one, other], SHARED, 1, lambda: None))
    assert [row["system"] for row in found if "per_second" in row] == ["A"]
    (skipped,) = (row for row in found if "skipped" in row)
    assert skipped["system"] == "B"
    assert "shared prefix" in str(skipped["skipped"])
    assert len(list(take_turns([one, other], WORKLOADS["1"], 1, lambda: None))) == 2
    one.end()
    other.end()


def test_a_process_that_ends_says_why(tmp_path: Path) -> None:
    broken = System("A", "fp32", [sys.executable, "-c", "import sys; sys.exit('no such model')"])
    with pytest.raises(Ended, match="A ended: no such model"):
        Running(broken, tmp_path / "log")


def test_prompts_share_what_they_are_to_share_and_nothing_with_another_round() -> None:
    before, measured = jobs(SHARED, 1)
    assert before.num_new == 1
    assert [len(prompt) for prompt in measured.prompts] == [12, 12]
    assert all(prompt[:8] == before.prompts[0] for prompt in measured.prompts)
    assert measured.prompts[0][8:] != measured.prompts[1][8:]
    assert jobs(SHARED, 1) == jobs(SHARED, 1)
    assert jobs(SHARED, 2)[0].prompts[0][0] != before.prompts[0][0]
    (alone,) = jobs(WORKLOADS["16"], 1)
    assert len({prompt[0] for prompt in alone.prompts}) > 1


def test_a_turn_counts_from_the_first_request_to_the_last_token() -> None:
    turn = turn_of({"times": [[1.0, 1.5, 2.0], [1.2, 1.3, 4.0]], "tokens": [[1, 2, 3, 4, 5], [6, 7, 8]]})
    assert turn.per_second == 2.0  # 8 tokens in 4 s
    assert turn.first_p50_ms == pytest.approx(1100)
    assert turn.first_p99_ms == pytest.approx(1198)
    assert turn.between_p99_ms == pytest.approx(2700 - 0.03 * 2200)
    assert turn.beginnings == [[1, 2, 3, 4], [6, 7, 8]]
    assert turn_of({"times": [[0.5]], "tokens": [[1]]}).between_p99_ms == 0


def test_a_figure_has_medians_over_rounds_and_ratios_within_a_round() -> None:
    def turn(seconds: float, token: int = 5) -> dict[str, object]:
        return {"times": [[seconds / 2, seconds]], "tokens": [[token, 6]]}

    ours = [turn_of(turn(seconds)) for seconds in (1.0, 2.0, 4.0)]
    theirs = [turn_of(turn(seconds, token)) for seconds, token in ((2.0, 5), (3.0, 5), (2.0, 7))]
    found = figure(theirs, ours)
    assert found["per_second"] == 1.0
    assert found["first_token_p50_ms"] == 1000
    assert found["first_system_times_this"] == 1.5  # of 2, 1.5 and 0.5
    assert found["same_beginnings"] == 0.67
    assert figure(ours, ours)["first_system_times_this"] == 1


def test_the_table_has_what_was_measured_and_sentences_for_the_rest() -> None:
    times = {"first_token_p50_ms": 70.5, "first_token_p99_ms": 80, "between_tokens_p99_ms": 9.5}
    rest = {**times, "first_system_times_this": 1, "load": 0.3}
    text = tables(
        [
            {"system": "llama.cpp", "skipped": "llama.cpp is had from npm, which is not installed"},
            {"system": "kvkeeper", "dtype": "bf16", "start_to_ready_s": 4.04},
            {"system": "vLLM", "dtype": "bf16", "start_to_ready_s": 50.1},
            {"system": "kvkeeper", "dtype": "bf16", "workload": "1", "per_second": 1055.4, **rest},
        ]
    )
    assert text.splitlines() == [
        "| tokens a second | 1 | start to ready, s |",
        "| --- | --- | --- |",
        "| kvkeeper bf16 | 1,055 | 4.0 |",
        "| vLLM bf16 | - | 50.1 |",
        "",
        "| workload | system | first token p50, ms | p99, ms | between tokens p99, ms | first system / this | load |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 1 | kvkeeper bf16 | 70.5 | 80 | 9.5 | 1 | 0.3 |",
        "",
        "llama.cpp is had from npm, which is not installed.",
    ]


def test_a_peer_that_does_not_install_is_left_out_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    chosen = choose(["--systems", "llama.cpp", "--environments", str(tmp_path)])
    (found,) = measure(chosen)
    assert found == {"system": "llama.cpp", "skipped": "llama.cpp is had from npm, which is not installed"}
    assert "npm, which is not installed." in capsys.readouterr().err
    (tmp_path / "npm").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "npm").chmod(0o755)
    with pytest.raises(environments.Failed, match=r"npm install .* failed"):
        environments.llama_cpp(tmp_path / "llama")
    assert not list((tmp_path / "llama").iterdir()), "it is made again when asked for again"


def test_names_choose_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = choose(["--systems", "kvkeeper,vllm", "--dtypes", "bf16", "--workloads", "1,16", "--rounds", "2"])
    assert (chosen.systems, chosen.dtypes, chosen.workloads) == (("kvkeeper", "vllm"), ("bf16",), ("1", "16"))
    with pytest.raises(SystemExit):
        choose(["--dtypes", "bf16,fp4"])
    assert "there is no fp4; there are fp32, bf16, int8, auto" in capsys.readouterr().err


def test_jobs_are_lines_of_json() -> None:
    (job,) = jobs(WORKLOADS["1"], 0)
    assert all(isinstance(token, int) for token in job.prompts[0]), json.dumps(job.prompts)
