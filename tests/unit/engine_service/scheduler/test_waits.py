"""Why a step cannot be launched behind the one that is computed, and why sequences are left out of one."""

import pytest

from kvkeeper.engine_service.scheduler.headroom import Moved
from kvkeeper.engine_service.scheduler.plan import Plan, StepWait
from kvkeeper.engine_service.values.request import Request
from tests.support.worlds.scheduler_world import World, make_request, tiered
from tests.support.worlds.state_world import StateWorld


class Waits:
    """What the scheduler says of each step of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.before_start: set[StepWait | None] = set()
        self.left_out: set[StepWait] = set()
        schedule, apply, find_wait = world.scheduler.schedule, world.scheduler.apply, world.scheduler.find_wait

        def note_plan(*args: object) -> Plan:
            plan = schedule(*args)  # type: ignore[arg-type]
            self.left_out |= set(plan.waits)
            return plan

        def note_answer(plan: Plan, answer: object) -> object:
            self.before_start.add(find_wait(plan, answer))  # type: ignore[arg-type]
            return apply(plan, answer)  # type: ignore[arg-type]

        world.scheduler.schedule = note_plan  # type: ignore[method-assign]
        world.scheduler.apply = note_answer  # type: ignore[method-assign, assignment]

    def run(self) -> None:
        self.world.run()
        self.world.check_outputs()


def submit(world: World, count: int, max_new_tokens: int = 8, **fields: object) -> list[Request]:
    requests = [make_request([1, place % 3, place], max_new_tokens, **fields) for place in range(count)]  # type: ignore[arg-type]
    return [world.submit(request) for request in requests]


def test_a_crowd_with_room_waits_for_nothing() -> None:
    waits = Waits(World(num_blocks=256))
    submit(waits.world, 8)
    waits.run()
    assert (waits.before_start, waits.left_out) == ({None}, set())


def test_guesses() -> None:
    waits = Waits(World(num_blocks=256, guess=lambda tokens, index: [0]))
    submit(waits.world, 2)
    waits.run()
    assert StepWait.GUESSES in waits.before_start


def test_blocks() -> None:
    waits = Waits(World(num_blocks=9))
    submit(waits.world, 3)
    waits.run()
    assert waits.before_start == {None, StepWait.BLOCKS}


def test_claims() -> None:
    waits = Waits(World(num_blocks=256))
    submit(waits.world, 2)
    waits.world.step()
    assert waits.before_start == {None}
    waits.world.cache.num_reclaim_hint = 1
    waits.world.step()
    waits.world.cache.num_reclaim_hint = 0
    waits.run()
    assert waits.before_start == {None, StepWait.CLAIMS}


def test_transfers() -> None:
    waits = Waits(tiered())
    submit(waits.world, 4)
    waits.run()
    assert StepWait.TRANSFERS in waits.before_start
    assert waits.world.scheduler.state.num_swapped_out


def test_turns() -> None:
    waits = Waits(World(num_blocks=256, decode_budget=2))
    submit(waits.world, 3)
    waits.run()
    assert waits.left_out == {StepWait.TURNS}


@pytest.mark.parametrize("prompt_len", [3, 20], ids=["decodes", "prompts"])
def test_shares(prompt_len: int) -> None:
    waits = Waits(World(client_shares=True, num_blocks=512))
    costs = waits.world.scheduler.state.decode_costs
    for num_tokens in (1, 2, 4, 8) * 4:
        costs.note(num_tokens, 0.003 + 0.001 * num_tokens)
    few = waits.world.submit(make_request([1, 2], 16, client="few", look_up=False))
    waits.world.step()
    assert few.num_new_tokens
    for place in range(10):
        prompt = [place % 3] * (prompt_len - 1) + [place]
        waits.world.submit(make_request(prompt, 4, client="many", look_up=False))
    for _ in range(4):
        waits.world.scheduler.note_step(waits.world.step(), 0.04, Moved())
    waits.run()
    assert waits.left_out == {StepWait.SHARES}


def test_forks() -> None:
    waits = Waits(StateWorld(chunk_size=4, ahead=True))
    waits.world.submit(make_request([1, 2, 0, 1, 2, 0, 1], 6, n=3))
    waits.run()
    assert StepWait.FORKS in waits.left_out
