"""Every plain step of these tests is also planned and built the general way, which has to give the same."""

from collections import Counter
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from kvkeeper.engine_service.scheduler import apply_answer, plain_steps, planner
from kvkeeper.engine_service.scheduler.batch_builder import assemble_work
from kvkeeper.engine_service.scheduler.plan import Plan
from kvkeeper.engine_service.scheduler.work import NO_CHANGES


def assert_same(ours: Any, other: Any, name: str = "") -> None:
    """Values, types and shapes, in all depths."""
    if is_dataclass(other):
        for each in fields(other):
            if each.name != "is_plain":
                assert_same(getattr(ours, each.name), getattr(other, each.name), f"{name}.{each.name}")
    elif isinstance(other, np.ndarray):
        assert (ours.dtype, ours.shape) == (other.dtype, other.shape), name
        np.testing.assert_array_equal(ours, other, name)
    else:
        assert ours == other, name


@pytest.fixture(autouse=True)
def num_plain(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps were planned and built as plain ones."""
    counts, plain_plan, plain_work = Counter[str](), plain_steps.plain_plan, plain_steps._plain_work
    general = planner.Planner.plan
    is_checking = False

    def plan_both(state: Any) -> Plan | None:
        nonlocal is_checking
        if is_checking or (plan := plain_plan(state)) is None:
            return None
        is_checking = True
        try:
            assert_same(plan, general(planner.Planner(state, apply_answer.Forks(state)), state.waiting.now))
        finally:
            is_checking = False
        counts["plan"] += 1
        return plan

    def work_both(running: Any, rows: Any, *columns: Any) -> Any:
        work, num_new = plain_work(running, rows, *columns), np.ones(len(rows), np.int32)

        class Answer:
            copy_sources = copy_destinations = np.empty(0, np.int32)

        assert_same(work, assemble_work(running, rows, num_new, {}, Answer, NO_CHANGES))  # type: ignore[arg-type]
        counts["work"] += 1
        return work

    monkeypatch.setattr(planner, "plain_plan", plan_both)
    monkeypatch.setattr(plain_steps, "_plain_work", work_both)
    return counts
