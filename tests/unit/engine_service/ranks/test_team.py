"""The processes of other ranks: which one was lost and how, what they log, and that none is left."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.model.hash_toy import HashToyConfig, HashToyRunner
from kvkeeper.engine_service.ranks import ranks as ranks_module
from kvkeeper.engine_service.ranks import team as team_module
from kvkeeper.engine_service.ranks.failures import RankLost, RankRefused, SumFailed
from kvkeeper.engine_service.ranks.messages import Kind
from kvkeeper.engine_service.ranks.ranked_runner import RankedRunner
from kvkeeper.engine_service.ranks.ranks import Ranks
from kvkeeper.engine_service.ranks.team import Team
from tests.support.processes import odd_rank
from tests.support.worlds.batches import ScheduledRow, build_batch

DEADLINE = 20.0


class NoMeeting:
    """Sums that nobody needs here."""

    num_left = 0

    def join(self, path: Path, rank: int, device: torch.device, timeout_s: float) -> None: ...

    def leave(self) -> None:
        self.num_left += 1

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        return part


@pytest.fixture(autouse=True)
def _odd_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "rank_process", odd_rank)
    monkeypatch.setattr(team_module, "_LAST_WORDS_S", 0.5)


@pytest.fixture
def lost() -> threading.Event:
    return threading.Event()


@pytest.fixture
def teams(lost: threading.Event) -> Iterator[Any]:
    made: list[Team] = []

    def make(*configs: dict[str, Any], timeout_s: float = DEADLINE) -> Team:
        made.append(Team(configs, NoMeeting(), timeout_s, lost.set))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for team in made:
        team.stop()
        assert team.processes == []


def test_all_are_told_and_heard(teams: Any) -> None:
    team = teams({"failed": [4]}, {"failed": [5, 6]})
    team.join(torch.device("cpu"))
    team.tell(Kind.FORWARD)
    assert [list(memoryview(body).cast("q")) for body in team.hear()] == [[4], [5, 6]]
    assert team.lost == ""


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"killed_at": Kind.FORWARD}, "rank 2: its process ended with -9"),
        ({"silent_at": Kind.FORWARD}, "rank 2: it does not answer"),
    ],
)
def test_the_rank_that_was_lost_is_named(teams: Any, lost: threading.Event, second: dict[str, Any], why: str) -> None:
    team = teams({}, second, timeout_s=2.0)
    team.join(torch.device("cpu"))
    team.tell(Kind.FORWARD)
    with pytest.raises(RankLost, match=why), capture_logs() as logs:
        team.hear()
    assert lost.wait(DEADLINE)
    assert team.lost == why
    assert [(entry["event"], entry["rank"]) for entry in logs if entry["event"] == "rank_lost"] == [("rank_lost", 2)]
    with pytest.raises(RankLost, match=why):
        team.tell(Kind.FORWARD)


def test_a_rank_that_ends_while_it_loads_is_noticed(teams: Any, lost: threading.Event) -> None:
    team = teams({}, {"code": 3})
    with pytest.raises(RankLost, match="rank 2: its process ended with 3"):
        team.join(torch.device("cpu"))
    assert lost.wait(DEADLINE)


def test_a_rank_that_ends_while_nothing_is_asked_is_noticed(teams: Any, lost: threading.Event) -> None:
    team = teams({"killed_at": Kind.COPIES})
    team.join(torch.device("cpu"))
    team.tell(Kind.COPIES)
    assert lost.wait(DEADLINE)
    assert team.lost == "rank 1: its process ended with -9"


def test_a_refusal_of_the_cache_service_is_no_loss(teams: Any) -> None:
    team = teams({"refused_at": Kind.ATTACH})
    team.join(torch.device("cpu"))
    team.tell(Kind.ATTACH)
    with pytest.raises(RankRefused) as refused:
        team.hear()
    assert refused.value.fields["reason"] == "A_TEST"
    assert team.lost == ""


def test_a_refusal_leaves_no_answer_of_another_rank_behind(teams: Any) -> None:
    team = teams({"refused_at": Kind.ATTACH, "failed": [1]}, {"failed": [7]})
    team.join(torch.device("cpu"))
    team.tell(Kind.ATTACH)
    with pytest.raises(RankRefused):
        team.hear()
    team.tell(Kind.FORWARD)
    assert [list(memoryview(body).cast("q")) for body in team.hear()] == [[1], [7]]


def test_what_a_rank_logs_goes_through_the_log_of_the_first(teams: Any, lost: threading.Event) -> None:
    line = '{"service": "engine", "pid": 7, "version": "0", "level": "warning", "event": "odd", "number": 3}'
    with capture_logs() as logs:
        teams({"says": [line, "a library speaks", '{"level": "exit"}'], "code": 0})
        assert lost.wait(DEADLINE)
    told = [entry for entry in logs if entry["event"] in ("odd", "rank_said")]
    assert told == [
        {"event": "odd", "log_level": "warning", "number": 3, "rank": 1},
        {"event": "rank_said", "log_level": "warning", "rank": 1, "line": "a library speaks"},
        {"event": "rank_said", "log_level": "warning", "rank": 1, "line": '{"level": "exit"}'},
    ]


def test_the_folder_of_the_meeting_is_private_and_goes(teams: Any) -> None:
    team = teams({})
    folder = team._folder
    assert folder.stat().st_mode & 0o777 == 0o700
    team.stop()
    assert not folder.exists()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(ranks_module, "Meeting", lambda num_ranks: NoMeeting())
    made = Ranks(EngineConfig(model=HASH_TOY, tensor_parallel=2))
    yield made
    made.stop()


def told(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
    monkeypatch.setattr(ranks, "_config_of", lambda rank: config)


def test_ranks_that_are_lost_again_and_again_are_hopeless_until_requests_get_on(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "_MOST_LOSSES", 1)  # the session loop's test has more
    told(ranks, monkeypatch, killed_at=Kind.FORWARD)
    ranks.make_ready()
    assert not ranks.are_hopeless
    ranks.tell(Kind.FORWARD)
    with pytest.raises(RankLost):
        ranks.hear()
    told(ranks, monkeypatch)
    ranks.make_ready()
    for kind in (Kind.MAKE_READY, Kind.SYNCHRONIZE, Kind.FORWARD):
        ranks.tell(kind)
        ranks.hear()
        assert ranks.are_hopeless, "a good step before the bad one says nothing"
    ranks.forget_losses()
    assert not ranks.are_hopeless


def test_ranks_that_cannot_say_that_they_have_unmapped_are_ended(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch, killed_at=Kind.DETACH)
    ranks.make_ready()
    (process,) = ranks.processes
    ranks.detach()
    assert ranks.processes == []
    assert not Path(f"/proc/{process}").exists()


def test_ranks_that_refuse_to_unmap_are_ended_and_started_anew(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch, refused_at=Kind.DETACH)
    ranks.make_ready()
    ranks.detach()
    assert ranks.processes == []
    ranks.start()
    assert len(ranks.processes) == 1


def runner_of(ranks: Ranks) -> RankedRunner:
    config = HashToyConfig()
    layout = config.kv_layout(4)
    return RankedRunner(
        HashToyRunner(config, layout.view(torch.zeros(4 * layout.block_bytes, dtype=torch.uint8)), layout), ranks
    )


BATCH = build_batch([ScheduledRow([1, 2], 0, [1])], 4)  # type: ignore[arg-type]


def test_orders_that_fail_elsewhere_are_told_once(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch, failed=[9])
    ranks.make_ready()
    runner = runner_of(ranks)
    runner.forward(BATCH)
    runner.synchronize()
    assert runner.take_failed() == [9, 9]
    assert runner.take_failed() == []


def test_a_step_that_the_first_rank_cannot_compute_is_its_own_fault(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch)
    ranks.make_ready()
    runner = runner_of(ranks)

    def fail(batch: object) -> None:
        raise MemoryError("a test")

    monkeypatch.setattr(runner._own, "forward", fail)
    with pytest.raises(RankLost, match=r"^the first rank could not compute a step: a test"):
        runner.forward(BATCH)
    runner.copy_blocks([])
    runner.synchronize()  # after a failure: without the others


def test_a_sum_that_fails_names_who_is_silent(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch, silent_at=Kind.FORWARD)
    ranks.make_ready()
    runner = runner_of(ranks)

    def fail(batch: object) -> None:
        raise SumFailed("timed out")

    monkeypatch.setattr(runner._own, "forward", fail)
    with pytest.raises(RankLost, match=r"^rank 1: it does not answer"):
        runner.forward(BATCH)
