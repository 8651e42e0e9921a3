"""The table of a sequence's states: a seeded mix makes only these transitions, and every one of them."""

import ast
import random
from collections import Counter
from pathlib import Path

import pytest

import kvkeeper.engine_service.values.request as transitions
from kvkeeper.engine_service.outputs.beam_search import BeamOptions
from kvkeeper.engine_service.scheduler.headroom import Preemption
from kvkeeper.engine_service.values.request import Sequence, SequenceState
from tests.support.worlds.beam_world import BeamWorld
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import World, make_request

NUM_SEEDS = 40
PACKAGE = Path(transitions.__file__).parents[1]


class Noted(dict[tuple[SequenceState, SequenceState], str]):
    """The table, with a count of what was asked of it."""

    def __init__(self) -> None:
        super().__init__(transitions.TRANSITIONS)
        self.made: Counter[object] = Counter()

    def __contains__(self, pair: object) -> bool:
        self.made[pair] += 1
        return super().__contains__(pair)


class LateWorld(BeamWorld):
    """A world in which the cache service takes a step to store a sequence, and sometimes has no slot for it."""

    dice: random.Random
    late: Sequence | None = None

    def create_all(self) -> None:
        scheduler = self.scheduler
        if self.late is not None:
            request, tokens, sequence_id = self.late.request, self.late.token_ids.tolist(), self.late.sequence_id
            self.cache.create(sequence_id, tokens, request.max_len, request.priority)
            scheduler.waiting.created(self.late)
            self.late = None
        if self.dice.random() < 0.1 and (sequence := scheduler.next_to_create()) is not None:
            scheduler.waiting.create_refused(sequence, try_again=True)
        if self.dice.random() < 0.3:
            self.late = scheduler.next_to_create()
        else:
            super().create_all()


def live(world: World) -> list[Sequence]:
    return [sequence for request in world.requests if request not in world.cancelled for sequence in request.sequences]


def submit_one(world: LateWorld, dice: random.Random) -> None:
    prompt, new = [1, dice.randint(1, 2), 2, 1, 1][: dice.randint(1, 5)], dice.randint(1, 4)
    if dice.random() < 0.4:
        request = world.submit_search(prompt, new, BeamOptions(dice.randint(2, 3)))
    else:
        request = world.submit(make_request(prompt, new, dice.randint(1, 3), look_up=dice.random() < 0.8))
    if dice.random() < 0.2:
        world.cancel(request, after=dice.randint(1, 15))


def mixed(dice: random.Random) -> LateWorld:
    """A world with searches and others, in which transfers fail, requests are cancelled, and sessions are lost."""
    sizes = (dice.randint(10, 18), dice.randint(1, 2))
    tier = {"num_host_blocks": dice.choice([6, 30])}
    world = LateWorld(
        *sizes, chunk_size=3, overlap=dice.random() < 0.5, make_cache=CoreCache, preemption=Preemption.SWAP, **tier
    )
    world.dice = dice
    share = dice.choice([0, 0.2])
    world.fails = lambda order_id, kind: dice.random() < share
    for awaited in dice.sample([SequenceState.LOADING, SequenceState.RETURNING, SequenceState.LEAVING], 3):
        for _ in range(5):
            submit_one(world, dice)
            for _ in range(dice.choice([0, 1, 4])):
                world.step()
        for _ in range(20):
            if found := [sequence for sequence in live(world) if sequence.state is awaited]:
                if dice.random() < 0.5:
                    world.cancel(found[0].request)
                else:
                    world.late = None
                    world.lose_session(lambda *sizes: CoreCache(*sizes, **tier))
                break
            world.step()
    return world


# A sequence with the blocks of another engine's: test_taking_over.py makes it.
TAKEN_OVER = {(SequenceState.NEW, SequenceState.RUNNING)}


def test_a_mix_makes_these_transitions_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    monkeypatch.setattr(transitions, "TRANSITIONS", noted)
    for seed in range(NUM_SEEDS):
        world = mixed(random.Random(seed))
        world.run(4000)
        world.check_searches()
    assert noted.keys() - noted.made.keys() == TAKEN_OVER


def test_a_sequence_that_has_ended_does_not_come_back() -> None:
    sequence = make_request([1], 1).sequences[0]
    transitions.move_to(sequence, SequenceState.ENDED)
    with pytest.raises(AssertionError, match="ENDED -> RUNNING"):
        transitions.move_to(sequence, SequenceState.RUNNING)


def test_nothing_else_sets_a_state() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store):
                is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
                found += [] if is_own else [path.name]
    assert found == ["request.py"]
