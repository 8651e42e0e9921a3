"""A step in which all rows decode, and nothing comes or goes, is array work: it looks at no sequence."""

from collections.abc import Callable
from typing import Any

import pytest

from kvkeeper.engine_service.values.request import Sequence
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import World, make_request

_OF_A_STEP = ("schedule", "find_wait", "apply", "advance")


class CountedSequences(list[Sequence | None]):
    """The sequences by row, and how often the scheduler has looked one up."""

    num_reads = 0
    is_counting = False

    def __getitem__(self, at: Any) -> Any:
        self.num_reads += self.is_counting
        return super().__getitem__(at)


def count_reads(world: World, monkeypatch: pytest.MonkeyPatch) -> CountedSequences:
    """Count from now on, while the scheduler is called: the world itself looks at each."""
    counted = world.scheduler.running.sequences = CountedSequences(world.scheduler.running.sequences)

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            counted.is_counting = True
            try:
                return call(*args)
            finally:
                counted.is_counting = False

        return called

    for name in _OF_A_STEP:
        monkeypatch.setattr(world.scheduler, name, counting(getattr(world.scheduler, name)))
    return counted


@pytest.mark.parametrize("ahead", [False, True])
def test_a_crowd_that_decodes_is_looked_at_only_where_one_comes_or_goes(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    world = World(num_blocks=256, make_cache=CoreCache, ahead=ahead)
    for index in range(8):
        world.submit(make_request([index, 1, 2], max_new_tokens=20))
    for _ in range(5):
        world.step()
    counted = count_reads(world, monkeypatch)
    for _ in range(8):
        assert len(world.step().rows) == 8
    assert not counted.num_reads
    world.submit(make_request([8, 1, 2], max_new_tokens=3))
    for _ in range(4):
        world.step()
    assert counted.num_reads
    world.run()
    world.check_outputs()


def test_what_waits_for_a_row_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(num_blocks=256, max_running=2)
    for index in range(3):
        world.submit(make_request([index, 1, 2], max_new_tokens=20))
    for _ in range(3):
        world.step()
    counted = count_reads(world, monkeypatch)
    monkeypatch.setattr(type(world.scheduler.waiting), "in_order", lambda *_: pytest.fail("no row is free"))
    for _ in range(12):
        assert len(world.step().rows) == 2
    assert not counted.num_reads
    monkeypatch.undo()
    world.run()
    world.check_outputs()
