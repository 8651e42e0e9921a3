"""The transitions of sequence states are those of the table, all of them; and the columns have one writer."""

import ast
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from kvkeeper.cache_service.core.sequences import sequence_table
from kvkeeper.cache_service.core.sequences.sequence_table import SequenceTable
from kvkeeper.cache_service.core.sequences.transitions import TRANSITIONS
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import SequenceState
from tests.support.tiers.tier_simulation import NUM_EVENTS, TierSimulation

_CORE = Path("cache_service/core")


def test_seeded_engines_make_each_transition_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[tuple[SequenceState, SequenceState]] = Counter()
    enter = SequenceTable._enter

    def counting(table: SequenceTable, slot: int, state: SequenceState) -> None:
        made[SequenceState(int(table.states[slot])), state] += 1
        enter(table, slot, state)

    monkeypatch.setattr(SequenceTable, "_enter", counting)
    for seed in range(13, 18):
        simulation = TierSimulation(seed)
        for _ in range(NUM_EVENTS):
            simulation.tick()
        simulation.finish()
    assert made.keys() == TRANSITIONS.keys(), made


@pytest.mark.parametrize(("before", "after"), [pair for pair in product(SequenceState, repeat=2) if pair not in TRANSITIONS])
def test_any_other_transition_is_a_bug(before: SequenceState, after: SequenceState) -> None:
    table = SequenceTable(PoolConfig(3, 1, 1, 2))
    table.states[0] = before
    with pytest.raises(AssertionError, match=f"from {before.name} to {after.name}"):
        table._enter(0, after)
    assert table.states[0] == before


def test_only_the_table_itself_writes_its_columns() -> None:
    columns = {name for name, value in vars(SequenceTable(PoolConfig(3, 1, 1, 2))).items() if hasattr(value, "dtype")}
    assert len(columns) > 20
    own = Path(sequence_table.__file__).name
    writes = [
        f"{path}:{node.lineno}"
        for path in _CORE.rglob("*.py")
        if path.name != own
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Attribute) and node.value.attr in columns
        if ast.unparse(node.value.value).endswith(("seqs", "sequences"))
    ]
    assert writes == []
