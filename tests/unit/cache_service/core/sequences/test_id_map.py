"""Ids are found one by one or by the column, with the same slots and the same refusals."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.sequences.id_map import IdMap
from kvkeeper.cache_service.core.values.errors import InvalidField, UnknownSequence


def map_of(count: int) -> IdMap:
    """Sequence i has slot 2 * i, for i from 1 to count; they came in any order."""
    ids = IdMap()
    for sequence_id in np.random.default_rng(0).permutation(count).tolist():
        ids.add(sequence_id + 1, 2 * (sequence_id + 1))
    return ids


@pytest.mark.parametrize("count", [3, 15, 16, 40])
def test_found_slots_are_those_of_the_ids_after_additions_and_removals(count: int) -> None:
    ids = map_of(count)
    ids.remove(2)
    left = np.array([sequence_id for sequence_id in range(count, 0, -1) if sequence_id != 2])
    assert ids.find(left, "f").tolist() == (2 * left).tolist()


@pytest.mark.parametrize("stranger", [0, -1, 2, 41, 2**53, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("count", [3, 20])
def test_an_id_that_is_not_there_is_refused_by_name(stranger: int, count: int) -> None:
    ids = map_of(40)
    ids.remove(2)
    named = np.array([*range(3, count + 3), stranger])
    with pytest.raises(UnknownSequence) as refused:
        ids.find(named, "f")
    assert refused.value.metadata["sequence_id"] == str(stranger)


@pytest.mark.parametrize("count", [3, 20])
def test_an_id_that_is_named_twice_is_refused(count: int) -> None:
    with pytest.raises(InvalidField, match="twice"):
        map_of(40).find(np.array([*range(1, count), 1]), "f")
