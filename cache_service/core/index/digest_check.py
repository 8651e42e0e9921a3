"""find_damaged: which believed blocks do not hold what they held when their rows were written.

Rules: only rows with a digest can be compared; a sample is compared first, and where one of it differs, all are. The caller
says how a digest is made, so this knows no memory.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..values.kept_index import Verification
from ..values.types import Int32Array, Tier
from .slot_table import Slots


class Damage(NamedTuple):
    """num_compared: of all tiers. blocks: those that differ, by tier."""

    num_compared: int
    blocks: list[Int32Array]

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.blocks))


def find_damaged(tiers: list[tuple[Tier, Slots]], how: Verification) -> Damage:
    """tiers: the rows of the believed blocks of each."""
    tiers = [(tier, slots.at(np.flatnonzero(slots.digests))) for tier, slots in tiers]
    num_blocks = sum(len(slots) for _, slots in tiers)
    is_sampled = np.ones(num_blocks, np.bool_)
    if 0 < how.num_sampled < num_blocks:
        is_sampled[:] = False
        is_sampled[np.random.default_rng(how.seed).permutation(num_blocks)[: how.num_sampled]] = True
    found = _compare(tiers, is_sampled, how)
    if not found.num_blocks or is_sampled.all():
        return found
    others = _compare(tiers, ~is_sampled, how)
    return Damage(num_blocks, [np.concatenate(both) for both in zip(found.blocks, others.blocks, strict=True)])


def _compare(tiers: list[tuple[Tier, Slots]], is_chosen: npt.NDArray[np.bool_], how: Verification) -> Damage:
    start, damaged = 0, list[Int32Array]()
    for tier, slots in tiers:
        chosen = slots.at(np.flatnonzero(is_chosen[start : start + len(slots)]))
        start += len(slots)
        damaged.append(chosen.blocks[how.digest(tier, chosen.blocks) != chosen.digests])
    return Damage(int(np.count_nonzero(is_chosen)), damaged)
