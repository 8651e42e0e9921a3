"""The processes of other ranks: which one was lost and how, what they log, and that none is left."""

import select
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from kvkeeper.engine_service.compute.device.device_errors import ReportedFault, lost_by
from kvkeeper.engine_service.compute.device.device_queue import HostQueue
from kvkeeper.engine_service.compute.model_runner import ModelRunner, StepBounds
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.model.hash_toy import HashToyConfig, HashToyRunner
from kvkeeper.engine_service.ranks import ranks as ranks_module
from kvkeeper.engine_service.ranks import team as team_module
from kvkeeper.engine_service.ranks.messages import Answer, Kind, RankLost, RankRefused, SumFailed
from kvkeeper.engine_service.ranks.ranked_runner import RankedRunner
from kvkeeper.engine_service.ranks.ranks import Ranks
from kvkeeper.engine_service.ranks.team import Team
from tests.support.processes import odd_rank
from tests.support.stand_ins.device_faults import out_of_memory
from tests.support.worlds.batches import ScheduledRow, build_batch

DEADLINE = 20.0
ILLEGAL, NO_MEMORY = "cudaErrorIllegalAddress", "cudaErrorMemoryAllocation"


class NoMeeting:
    """Sums that are not needed here."""

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
    team.send_all(Kind.FORWARD)
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
    team.send_all(Kind.FORWARD)
    with pytest.raises(RankLost, match=why), capture_logs() as logs:
        team.hear()
    assert lost.wait(DEADLINE)
    assert team.lost == why
    assert [(entry["event"], entry["rank"]) for entry in logs if entry["event"] == "rank_lost"] == [("rank_lost", 2)]
    with pytest.raises(RankLost, match=why):
        team.send_all(Kind.FORWARD)


def test_a_rank_that_ends_while_it_loads_is_noticed(teams: Any, lost: threading.Event) -> None:
    team = teams({}, {"code": 3})
    with pytest.raises(RankLost, match="rank 2: its process ended with 3"):
        team.join(torch.device("cpu"))
    assert lost.wait(DEADLINE)


def test_a_rank_that_ends_while_nothing_is_asked_is_noticed(teams: Any, lost: threading.Event) -> None:
    team = teams({"killed_at": Kind.COPIES})
    team.join(torch.device("cpu"))
    team.send_all(Kind.COPIES)
    assert lost.wait(DEADLINE)
    assert team.lost == "rank 1: its process ended with -9"


def test_a_refusal_of_the_cache_service_is_no_loss(teams: Any) -> None:
    team = teams({"refused_at": Kind.ATTACH})
    team.join(torch.device("cpu"))
    team.send_all(Kind.ATTACH)
    with pytest.raises(RankRefused) as refused:
        team.hear()
    assert refused.value.fields == {"code": "ABORTED", "reason": "A_TEST", "message": "rank 1: no"}
    assert team.lost == ""


def test_a_refusal_leaves_no_answer_of_another_rank_behind(teams: Any) -> None:
    team = teams({"refused_at": Kind.ATTACH, "failed": [1]}, {"failed": [7]})
    team.join(torch.device("cpu"))
    team.send_all(Kind.ATTACH)
    with pytest.raises(RankRefused):
        team.hear()
    team.send_all(Kind.FORWARD)
    assert [list(memoryview(body).cast("q")) for body in team.hear()] == [[1], [7]]


def test_what_a_rank_logs_goes_through_the_log_of_the_first(teams: Any, lost: threading.Event) -> None:
    line = '{"service": "engine", "pid": 7, "version": "0", "level": "warning", "event": "odd", "number": 3}'
    with capture_logs() as logs:
        teams({"says": [line, "a library speaks", '{"level": "exit"}'], "code": 0})
        assert lost.wait(DEADLINE)
    told = [entry for entry in logs if entry["event"] in ("odd", "rank_said")]
    assert told == [
        {
            "event": "odd",
            "log_level": "warning",
            "number": 3,
            "rank": 1,
            "service": "engine",
            "pid": 7,
            "version": "0",
        },
        {"event": "rank_said", "log_level": "warning", "rank": 1, "line": "a library speaks"},
        {"event": "rank_said", "log_level": "warning", "rank": 1, "line": '{"level": "exit"}'},
    ]


def test_the_folder_of_the_meeting_is_private_and_goes(teams: Any) -> None:
    team = teams({})
    folder = team._folder
    assert folder.stat().st_mode & 0o777 == 0o700
    team.stop()
    assert not folder.exists()


def no_rank_lost(logs: Sequence[Mapping[str, Any]]) -> bool:
    return not [entry for entry in logs if entry["event"] == "rank_lost"]


@pytest.mark.parametrize("other", [{}, {"parts_at": Kind.FORWARD}], ids=["the other waits", "the other parts"])
@pytest.mark.parametrize("hangs", [False, True], ids=["it ends", "it hangs"])
def test_a_rank_that_loses_its_device_in_a_step_is_named(
    teams: Any, lost: threading.Event, other: dict[str, Any], hangs: bool
) -> None:
    team = teams(other, {"faults_at": Kind.FORWARD, "fault": ILLEGAL, "hangs": hangs})
    team.join(torch.device("cpu"))
    with capture_logs() as logs:
        team.send_all(Kind.FORWARD)
        with pytest.raises(ReportedFault, match=f"^rank 2 on cuda:1: {ILLEGAL}: a kernel went wrong"):
            team.hear()
        assert lost.wait(DEADLINE)
    assert team.fault.name == ILLEGAL
    assert no_rank_lost(logs), "the engine tells it, once"
    with pytest.raises(ReportedFault, match=r"^rank 2 "):
        team.send_all(Kind.FORWARD)


@pytest.mark.parametrize("fault", [ILLEGAL, NO_MEMORY])
def test_a_rank_whose_device_fails_while_it_loads_is_named(teams: Any, fault: str) -> None:
    team = teams({}, {"faults_at": Kind.SET_UP, "fault": fault, "sizes": "much was asked for"})
    with capture_logs() as logs, pytest.raises(ReportedFault, match=rf"^rank 2 on cuda:1: {fault} \(much was asked for\): "):
        team.join(torch.device("cpu"))
    assert no_rank_lost(logs)


def test_a_device_that_is_lost_while_nothing_is_asked_is_noticed(teams: Any, lost: threading.Event) -> None:
    team = teams({"faults_at": Kind.COPIES, "fault": ILLEGAL})
    team.join(torch.device("cpu"))
    team.send_all(Kind.COPIES)
    assert lost.wait(DEADLINE)
    assert team.lost.startswith(f"rank 1 on cuda:1: {ILLEGAL}: ")
    assert team.fault.name == ILLEGAL


def has_spoken(team: Team, rank: int) -> bool:
    """Wait until the rank has said something that is not read yet."""
    return bool(select.select([team._members[rank - 1]._pipe._connection], [], [], DEADLINE)[0])


def test_a_loss_that_was_told_counts_more_than_the_end_of_another_rank(teams: Any, lost: threading.Event) -> None:
    team = teams({"killed_at": Kind.COPIES}, {"faults_at": Kind.TRANSFERS, "fault": ILLEGAL, "hangs": True})
    team.join(torch.device("cpu"))
    team.send_all(Kind.TRANSFERS)
    assert has_spoken(team, 2)
    team.send_all(Kind.COPIES)
    assert lost.wait(DEADLINE)
    assert team.lost.startswith(f"rank 2 on cuda:1: {ILLEGAL}: ")


def test_a_loss_that_is_told_late_is_heard(teams: Any, lost: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    team = teams({"parts_at": Kind.COPIES}, {"faults_at": Kind.TRANSFERS, "fault": ILLEGAL, "hangs": True})
    team.join(torch.device("cpu"))
    first, second = team._members
    wait = first.process.wait

    def wait_while_the_other_speaks(timeout: float | None = None) -> int:
        if timeout is not None:  # the search for the cause has begun
            second.send(Kind.TRANSFERS, b"", DEADLINE)
            assert has_spoken(team, 2)
        return int(wait(timeout))

    with monkeypatch.context() as patched:
        patched.setattr(first.process, "wait", wait_while_the_other_speaks)
        first.send(Kind.COPIES, b"", DEADLINE)
        assert lost.wait(DEADLINE)
    assert team.lost.startswith(f"rank 2 on cuda:1: {ILLEGAL}: ")


def test_a_loss_that_was_told_counts_more_than_the_refusal_before_it(teams: Any, lost: threading.Event) -> None:
    team = teams({"refused_at": Kind.ATTACH, "faults_at": Kind.COPIES, "fault": ILLEGAL})
    team.join(torch.device("cpu"))
    team.send_all(Kind.ATTACH)
    team.send_all(Kind.COPIES)
    assert lost.wait(DEADLINE)
    assert team.fault.name == ILLEGAL


def test_a_shortage_in_a_step_is_told_in_words_and_the_rank_is_started_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(ranks, monkeypatch, faults_at=Kind.FORWARD, fault=NO_MEMORY, answer=Answer.FAILED)
    ranks.make_ready()
    ranks.send_all(Kind.FORWARD)
    with capture_logs() as logs, pytest.raises(RankLost, match=f"^rank 1 on cuda:1: {NO_MEMORY}: the device has not"):
        ranks.hear()
    (line,) = (entry for entry in logs if entry["event"] == "rank_lost")
    assert (line["rank"], line["why"]) == (1, ranks.lost)
    assert ranks.fault is None
    told(ranks, monkeypatch)
    ranks.make_ready()
    assert ranks.lost == ""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(ranks_module, "Meeting", lambda num_ranks: NoMeeting())
    made = Ranks(EngineConfig(model=HASH_TOY, tensor_parallel=2))
    yield made
    made.stop()


def told(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
    monkeypatch.setattr(ranks, "_make_config", lambda rank: config)


def test_ranks_that_are_lost_again_and_again_are_hopeless_until_requests_get_on(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "MOST_LOSSES", 1)  # the session loop's test has more
    told(ranks, monkeypatch, killed_at=Kind.FORWARD)
    ranks.make_ready()
    assert not ranks.are_hopeless
    ranks.send_all(Kind.FORWARD)
    with pytest.raises(RankLost):
        ranks.hear()
    told(ranks, monkeypatch)
    ranks.make_ready()
    for kind in (Kind.MAKE_READY, Kind.SYNCHRONIZE, Kind.FORWARD):
        ranks.send_all(kind)
        ranks.hear()
        assert ranks.are_hopeless, "a good step before the bad one says nothing"
    ranks.forget_losses()
    assert not ranks.are_hopeless


def test_ranks_that_cannot_say_that_they_have_unmapped_are_ended(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch, killed_at=Kind.DETACH)
    ranks.make_ready()
    (process,) = ranks.processes
    assert ranks.detach(), "nothing is mapped any more"
    assert ranks.processes == []
    assert not Path(f"/proc/{process}").exists()


@pytest.mark.parametrize("are_stopped", [False, True], ids=["it says nothing", "they were stopped"])
def test_a_rank_that_cannot_be_ended_still_maps_its_memory(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, are_stopped: bool
) -> None:
    told(ranks, monkeypatch, refused_at=Kind.DETACH)
    ranks.make_ready()
    assert ranks._team is not None
    (member,) = ranks._team._members
    with monkeypatch.context() as hanging:
        hanging.setattr(team_module, "_END_S", 0.0)
        hanging.setattr(member.process, "kill", lambda: None)  # as where a driver does not let it go
        if are_stopped:
            ranks.stop()
        assert not ranks.detach()
    assert member.process.returncode is None
    member.process.kill()
    member.process.wait(DEADLINE)


def test_ranks_that_refuse_to_unmap_are_ended_and_started_anew(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch, refused_at=Kind.DETACH)
    ranks.make_ready()
    ranks.detach()
    assert ranks.processes == []
    ranks.start()
    assert len(ranks.processes) == 1


@pytest.mark.parametrize("at", [Kind.ATTACH, Kind.DETACH])
def test_no_rank_is_started_after_one_that_has_lost_its_device(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, at: Kind) -> None:
    told(ranks, monkeypatch, faults_at=at, fault=ILLEGAL)
    ranks.make_ready()
    (process,) = ranks.processes
    if at == Kind.ATTACH:
        with pytest.raises(ReportedFault, match=r"^rank 1 "):
            ranks.ask(Kind.ATTACH)
    ranks.detach()
    assert not Path(f"/proc/{process}").exists()
    for begin in (ranks.start, ranks.make_ready):
        with pytest.raises(ReportedFault, match=r"^rank 1 "):
            begin()
    assert ranks.processes == []
    assert not ranks.are_hopeless


def test_the_first_rank_that_cannot_meet_because_of_its_device_says_so(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*parts: object) -> None:
        raise out_of_memory()

    told(ranks, monkeypatch)
    monkeypatch.setattr(NoMeeting, "join", fail)
    with capture_logs() as logs, pytest.raises(torch.OutOfMemoryError):
        ranks.make_ready()
    assert no_rank_lost(logs)


class FailingWarmUp(ModelRunner):
    """The first rank's part, whose warm-up fails."""

    def __init__(self, error: Exception) -> None:
        self.queue, self._error = HostQueue(), error

    def make_ready(self, *parts: object, **more: object) -> None:
        raise self._error


def warm_up(ranks: Ranks, error: Exception) -> None:
    RankedRunner(FailingWarmUp(error), ranks).make_ready(StepBounds(1, 8, 8), None, with_retention=False, progress=False)


@pytest.mark.parametrize(
    ("config", "expected", "words"),
    [
        ({"faults_at": Kind.MAKE_READY, "fault": ILLEGAL}, ReportedFault, f"^rank 1 on cuda:1: {ILLEGAL}: "),
        ({"faults_at": Kind.MAKE_READY, "fault": NO_MEMORY}, ReportedFault, f"^rank 1 on cuda:1: {NO_MEMORY}: "),
        ({"killed_at": Kind.MAKE_READY}, RankLost, "^rank 1: its process ended with -9"),
    ],
)
def test_a_rank_that_is_lost_in_the_warm_up_is_named(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], expected: type[Exception], words: str
) -> None:
    told(ranks, monkeypatch, **config)
    ranks.make_ready()
    with pytest.raises(expected, match=words):
        warm_up(ranks, SumFailed("another has ended"))


def test_a_warm_up_that_the_first_rank_fails_ends_the_others(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch, silent_at=Kind.MAKE_READY)
    ranks.make_ready()
    with capture_logs() as logs, pytest.raises(torch.OutOfMemoryError):
        warm_up(ranks, out_of_memory())
    assert no_rank_lost(logs)
    assert ranks.processes == []


def runner_of(ranks: Ranks) -> RankedRunner:
    config = HashToyConfig()
    layout = config.kv_layout(4)
    return RankedRunner(
        HashToyRunner(config, layout.view(torch.zeros(4 * layout.block_bytes, dtype=torch.uint8)), layout), ranks
    )


def fail_forward(runner: RankedRunner, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank's part of the next forward pass raises the error."""

    def fail(batch: object) -> None:
        raise error

    monkeypatch.setattr(runner._own, "forward", fail)


BATCH = build_batch([ScheduledRow([1, 2], 0, [1])], 4)  # type: ignore[arg-type]


def test_orders_that_fail_elsewhere_are_told_once(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch, failed=[9])
    ranks.make_ready()
    runner = runner_of(ranks)
    runner.forward(BATCH)
    runner.synchronize()
    assert runner.take_failed([7, 8]) == set()
    assert runner.take_failed([7, 9]) == {9}
    assert runner.take_failed([9]) == set()


def test_a_step_that_the_first_rank_cannot_compute_is_its_own_fault(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch)
    ranks.make_ready()
    runner = runner_of(ranks)
    fail_forward(runner, MemoryError("a test"), monkeypatch)
    with pytest.raises(RankLost, match=r"^the first rank could not compute a step: a test"):
        runner.forward(BATCH)
    runner.copy_blocks([])
    runner.synchronize()  # after a failure: without the others


def test_a_sum_that_fails_names_who_is_silent(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch, silent_at=Kind.FORWARD)
    ranks.make_ready()
    runner = runner_of(ranks)
    fail_forward(runner, SumFailed("timed out"), monkeypatch)
    with pytest.raises(RankLost, match=r"^rank 1: it does not answer"):
        runner.forward(BATCH)


def test_a_device_that_is_lost_to_another_rank_is_told_by_a_forward_pass(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch, faults_at=Kind.FORWARD, fault=ILLEGAL)
    ranks.make_ready()
    runner = runner_of(ranks)
    with pytest.raises(ReportedFault, match=r"^rank 1 ") as failed:
        runner.forward(BATCH)
    lost = lost_by(failed.value)
    assert lost is not None
    assert lost.fault == ranks.lost
    runner.synchronize()  # as a step without a batch, after which the loop looks for losses


def test_a_device_that_is_lost_between_two_ranks_sums_is_no_failed_sum(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    told(ranks, monkeypatch, faults_at=Kind.FORWARD, fault=ILLEGAL)
    ranks.make_ready()
    runner = runner_of(ranks)
    fail_forward(runner, SumFailed("Connection closed by peer"), monkeypatch)
    with pytest.raises(ReportedFault, match=f"^rank 1 on cuda:1: {ILLEGAL}: "):
        runner.forward(BATCH)
