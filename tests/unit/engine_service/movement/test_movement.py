"""Requests that change their engine: what Movement does makes the transitions of its table, all of them and no others."""

from functools import partial
from typing import cast

import grpc
import numpy as np
import pytest

from kvkeeper.client.errors import KvkeeperError
from kvkeeper.engine_service.cache_session.kv_memory import KvMemory
from kvkeeper.engine_service.loop.between_steps import BetweenSteps
from kvkeeper.engine_service.loop.engine import Engine, make_engine
from kvkeeper.engine_service.movement import movement as movement_part
from kvkeeper.engine_service.movement.movement import TRANSITIONS, Movement, MoveState
from kvkeeper.engine_service.outputs.generation import Generation
from kvkeeper.engine_service.outputs.model_text import StopRules
from kvkeeper.engine_service.scheduler.limits import Limits
from kvkeeper.engine_service.values.errors import Draining, RequestMoved
from kvkeeper.engine_service.values.request import Request, TakenBlocks
from kvkeeper.engine_service.values.sampling_params import GREEDY
from tests.support.stand_ins.no_text import NoText

LIMITS = Limits(2, 30, 8, 4, 64, 64, 64, 8, num_usable_blocks=19)


class Noted(dict[tuple[MoveState, MoveState], str]):
    """The table, which notes what was looked up in it."""

    def __init__(self) -> None:
        super().__init__(TRANSITIONS)
        self.made: set[tuple[MoveState, MoveState]] = set()

    def __contains__(self, key: object) -> bool:
        self.made.add(cast(tuple[MoveState, MoveState], key))
        return super().__contains__(key)


class Memory:
    """A session whose offers another one takes, or does not."""

    def __init__(self) -> None:
        self.refuses = False

    async def take(self, offer: bytes, sequence_id: int) -> TakenBlocks:
        if self.refuses:
            raise KvkeeperError(grpc.StatusCode.NOT_FOUND, "UNKNOWN_SEQUENCE", "no such offer")
        return TakenBlocks(sequence_id, 3, 2, 4, np.array([5, 6], np.int32))


def engine_with(memory: Memory | None) -> Engine:
    engine = make_engine(max_waiting=10)
    engine.scheduler.reset(LIMITS)
    engine.memory = cast(KvMemory | None, memory)
    return engine


def made(name: str) -> Generation:
    return Generation(Request(name, np.array([1, 2, 3], np.int32), 5), GREEDY, 0, StopRules(), [NoText()], lambda _: None)


def submitted(engine: Engine, *names: str) -> list[Generation]:
    """Requests that came while there was a session, which is gone."""
    engine.memory = cast(KvMemory, Memory())
    generations = [made(name) for name in names]
    for generation in generations:
        engine.submit(generation)
    engine.memory = None
    return generations


async def test_all_ways_make_these_transitions_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    monkeypatch.setattr(movement_part, "TRANSITIONS", noted)
    engine = engine_with(None)
    movement, requests = Movement(engine), engine.requests
    moved, refused, ended, early, undecided = all_of_them = submitted(engine, "moved", "refused", "ended", "early", "not sent")
    assert movement.leave(all_of_them[:3]).is_set(), "without a session no step can run"
    assert requests.num_held == 3
    assert engine.scheduler.num_waiting == 2
    for generation in (moved, refused):
        assert await movement.offers(generation) == {}
    moved.fail(RequestMoved("the request goes on in another engine"))
    ended.cancel()
    for generation in (moved, refused, ended):
        movement.put_back(generation)
    assert list(requests.generations) == ["refused", "early", "not sent"]
    assert (requests.num_held, engine.scheduler.num_waiting) == (0, 3)
    movement.leave([early, undecided], when=lambda: False)
    early.cancel()
    for generation in (early, undecided):
        movement.put_back(generation)
    assert undecided.is_open
    engine.memory = cast(KvMemory, Memory())
    movement.hold(new := made("new"))
    assert requests.num_held == 1
    movement.put_back(new)
    await movement.close(new)
    assert noted.made == TRANSITIONS.keys()


async def test_a_request_leaves_where_no_step_is_running_and_once_it_may() -> None:
    engine = engine_with(None)
    movement, changes = Movement(engine), engine._changes
    (generation,) = submitted(engine, "one")
    engine.memory = cast(KvMemory, Memory())
    may = False
    has_left = movement.leave([generation], when=lambda: may)
    changes.make()
    assert engine.requests.num_held == 0
    assert not changes.is_due
    may = True
    assert changes.is_due
    changes.make()
    assert engine.requests.num_held == 1
    assert not has_left.is_set(), "the cache service may not know yet what was computed"
    changes.note_reported()
    assert has_left.is_set()


async def test_a_request_that_ended_holds_up_no_step_for_ever() -> None:
    engine = engine_with(None)
    movement, changes = Movement(engine), engine._changes
    (generation,) = submitted(engine, "one")
    engine.memory = cast(KvMemory, Memory())
    movement.leave([generation], when=lambda: False)
    generation.cancel()
    await movement.close(generation)
    changes.make()
    assert not changes._waiting


@pytest.mark.parametrize(("refuses", "num_entering"), [(False, 1), (True, 0)])
async def test_a_request_of_another_engine_is_queued_with_the_blocks_that_are_still_offered(
    refuses: bool, num_entering: int
) -> None:
    memory = Memory()
    memory.refuses = refuses
    engine = engine_with(memory)
    await Movement(engine).adopt(made("theirs"), {0: b"offer"})
    assert len(engine.scheduler.state.entering) == num_entering
    assert engine.scheduler.num_waiting == 1 - num_entering


async def test_blocks_of_a_request_that_is_refused_are_released() -> None:
    engine = engine_with(Memory())

    class Closing(Memory):
        async def take(self, offer: bytes, sequence_id: int) -> TakenBlocks:
            engine.is_handing_over = True
            return await super().take(offer, sequence_id)

    engine.memory = cast(KvMemory, Closing())
    with pytest.raises(Draining):
        await Movement(engine).adopt(made("theirs"), {0: b"offer"})
    assert len(engine.scheduler.waiting.releases) == 1


async def test_blocks_that_came_for_a_session_that_was_lost_meanwhile_are_not_used() -> None:
    engine = engine_with(Memory())

    class Losing(Memory):
        async def take(self, offer: bytes, sequence_id: int) -> TakenBlocks:
            engine.memory = None
            return await super().take(offer, sequence_id)

    engine.memory = cast(KvMemory, Losing())
    assert await Movement(engine).take(made("theirs"), {0: b"offer"}) == {}


def test_changes_are_made_in_order_and_each_once() -> None:
    changes, found, due = BetweenSteps(), list[str](), set[str]()
    events = {name: changes.add(partial(found.append, name), partial(due.__contains__, name)) for name in "abc"}
    assert not changes.is_due
    due |= {"c", "a"}
    changes.make()
    changes.make()
    assert found == ["a", "c"]
    changes.note_reported()
    assert [name for name, event in events.items() if event.is_set()] == ["a", "c"]
