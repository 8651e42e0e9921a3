"""Whether a step can do without the blocks of what it releases, so that these are given back after its answer."""

from ..pool_state import PoolState


def num_wanted(state: PoolState, start_slots: list[int], *, num_new: int) -> int:
    """Blocks that a step may take for its starts, without their hits, and for num_new that its reservations want."""
    seqs = state.sequences
    lens = (seqs.num_blocks(int(seqs.num_tokens[slot])) for slot in start_slots)
    return num_new + sum(seqs.new_entries.num_blocks(0, length) for length in lens)


def fits_in_free(state: PoolState, num_blocks: int, num_granted: int) -> bool:
    """Whether so many blocks are free, and leave enough for growth: nothing is evicted, and no claim comes first.

    num_granted: sequences that the step grants slots to; one more block for each has to be left, because an engine that is told
    of fewer takes blocks back from its sequences. Never so in a pool with a host tier.
    """
    if state.claims.claims or state.lower_tier is not None:
        return False
    pool = state.pool
    num_grown = num_granted * state.sequences.num_groups
    return num_blocks <= len(pool.free) and num_blocks + num_grown + state.num_spare() <= pool.num_available
