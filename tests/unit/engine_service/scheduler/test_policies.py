"""Which starts next: each policy's order, what bounds it, and when the adaptive one chooses another."""

import itertools

import pytest

from kvkeeper.engine_service.scheduler.policies import MOST_JOB_SECONDS, POLICY_NAMES, Adaptive, make_ordering
from kvkeeper.engine_service.scheduler.waiting import WaitingSequences
from kvkeeper.engine_service.values.request import Request
from tests.support.worlds.scheduler_world import World, make_request

pytestmark = pytest.mark.usefixtures("each_cache")


def world_of(policy: str, **options: int) -> World:
    """One sequence runs at a time unless told otherwise, so that starts have an order."""
    return World(waiting=WaitingSequences(make_ordering(policy)), **{"max_running": 1, **options})


def starts(world: World) -> list[Request]:
    world.run()
    world.check_outputs()
    return [sequence.request for sequence in world.started]


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", [0, 1, 2, 3]), ("sjf", [2, 1, 3, 0]), ("priority", [2, 3, 0, 1]), ("adaptive", [0, 1, 2, 3])]
)
def test_each_policy_has_its_order(policy: str, order: list[int]) -> None:
    world = world_of(policy)
    jobs = [([1] * 9, 3, 0), ([2] * 3, 4, -100), ([0], 2, 100), ([0] * 7, 2, 100)]
    requests = [world.submit(make_request(prompt, new, priority=priority)) for prompt, new, priority in jobs]
    assert [requests.index(request) for request in starts(world)] == order


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_equals_start_in_order_of_arrival(policy: str) -> None:
    world = world_of(policy)
    requests = [world.submit(make_request([place % 3, 1, 2], 2)) for place in range(12)]
    assert starts(world) == requests


@pytest.mark.parametrize(("seconds", "low_is_first"), [(9.9, False), (10.1, True)])
def test_a_low_request_goes_before_a_normal_one_that_comes_ten_seconds_later(seconds: float, low_is_first: bool) -> None:
    world = world_of("priority")
    low = world.submit(make_request([1, 2], 2, priority=-100))
    world.now += seconds
    normal = world.submit(make_request([2, 2], 2))
    assert starts(world) == ([low, normal] if low_is_first else [normal, low])


@pytest.mark.parametrize("policy", ["sjf", "priority"])
def test_no_request_starves_however_many_come_later(policy: str) -> None:
    """What is shorter, or more important, comes faster than it can be served; it overtakes for so many seconds and no more."""
    world = world_of(policy, num_blocks=4000)
    slow = world.submit(make_request([1] * 4000, 2, priority=-100))
    bound = MOST_JOB_SECONDS if policy == "sjf" else 10.0
    while slow.sequences[0].row is None:
        world.submit(make_request([2], 2))
        world.now += 0.1
        world.step()
        assert world.now < 10 * bound, "starvation"
    came_at = [sequence.request.arrived_at for sequence in world.started[:-1]]
    assert len(came_at) > 20, "many overtook it"
    assert bound - 1 < max(came_at) < bound + 0.1


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_refused_start_keeps_its_place_before_all_that_come(policy: str) -> None:
    world = world_of(policy, num_blocks=9)
    world.hold_blocks(8)  # all of them
    big = world.submit(make_request([2] * 12, 2))
    world.step()
    small = [world.submit(make_request([0], 2)) for _ in range(5)]
    for _ in range(3):
        world.step()
    world.release_held_blocks()
    assert starts(world) == [big, *small]


def test_only_a_more_important_request_goes_before_a_refused_start() -> None:
    world = world_of("priority", num_blocks=9, max_running=8)
    world.hold_blocks(8)  # all of them
    refused = world.submit(make_request([2] * 12, 2))
    world.step()
    equal, high = (world.submit(make_request([1], 2, priority=priority)) for priority in (0, 100))
    world.step()
    world.release_held_blocks()
    assert starts(world) == [high, refused, equal]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_equals_do_not_take_turns_and_a_preempted_request_keeps_its_place(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.worlds.scheduler_world.STEP_S", 0.0)  # so that what is shorter has the better rank
    world = world_of(policy, num_blocks=20, max_running=8)
    old, young = (world.submit(make_request([place, 2, 0, 1], 28, look_up=False)) for place in range(2))
    while not young.num_preemptions:
        world.step()
    late = world.submit(make_request([0], 1))
    assert starts(world) == [old, young, young, late]
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_order_survives_a_lost_session(policy: str) -> None:
    world = world_of(policy)
    requests = [world.submit(make_request([place % 3] * 4, 3)) for place in range(5)]
    world.step()
    assert world.scheduler.reset(world.limits) == []
    world.cache.__init__(64, 2, 64)  # type: ignore[misc]
    world.memory.clear()
    assert starts(world) == [requests[0], *requests]


def test_adaptive_takes_each_policy_and_comes_back_with_hysteresis() -> None:
    adaptive, clock = Adaptive(), itertools.count(0.0, 10.0)

    def after(age: float, backlog: float) -> str:
        adaptive.measure(next(clock), age, backlog)
        return adaptive.policy.name

    assert after(0, 0) == after(3, 1.9) == "fcfs"
    assert after(3, 2.1) == "sjf"
    assert after(3, 1.9) == after(19, 0.3) == "sjf", "not back at the threshold up"
    assert after(3, 0.2) == "fcfs"
    assert after(3, 1.9) == "fcfs", "not up again at the threshold down"
    assert after(19, 9) == "sjf"
    assert after(21, 9) == "priority"
    assert after(19, 9) == after(11, 0.1) == "priority", "not back at the threshold up"
    assert after(9, 9) == "sjf"
    assert after(21, 9) == "priority"
    assert after(9, 0.1) == "fcfs"
    assert adaptive.num_switches == 7


def test_adaptive_stays_a_second_with_what_it_chose() -> None:
    adaptive = Adaptive()
    assert adaptive.measure(0.0, 0, 5)
    assert not adaptive.measure(0.9, 0, 0)
    assert adaptive.policy.name == "sjf"
    assert adaptive.measure(1.1, 0, 0)
    assert adaptive.policy.name == "fcfs"


def test_adaptive_measures_the_queue_and_sorts_it_anew() -> None:
    """A backlog of more than two steps lets the short one through; when that one is 20 s old, the important one."""
    world = world_of("adaptive", prefill_budget=8, num_blocks=128)
    runner = world.submit(make_request([1, 1], 60))
    world.step()
    long = world.submit(make_request([2] * 16, 2))
    assert world.scheduler.waiting.ordering.policy.name == "fcfs"
    short, low = world.submit(make_request([2, 0], 2)), world.submit(make_request([0], 1, priority=-100))
    world.step()
    assert world.scheduler.waiting.ordering.policy.name == "sjf"
    assert list(world.scheduler.waiting.in_order()) == [request.sequences[0] for request in (low, short, long)]
    world.now += 21
    world.step()
    assert world.scheduler.waiting.ordering.policy.name == "priority"
    assert list(world.scheduler.waiting.in_order()) == [request.sequences[0] for request in (long, short, low)]
    assert starts(world) == [runner, long, short, low]
    assert world.scheduler.waiting.ordering.num_switches == 2 or world.scheduler.waiting.ordering.policy.name == "fcfs"
