"""Whether a step can do without the blocks of what it releases, so that these are given back after its answer."""

from ..pool_state import PoolState


def fits_in_free(state: PoolState, start_slots: list[int], *, num_reservations: int, num_new: int) -> bool:
    """Whether a step grants something, and there are free blocks for all of it: nothing is evicted, and no claim comes first.

    num_new: blocks that its reservations want. Each of them is counted with one more to copy to, and a start without its hit.
    Never so in a pool with a host tier.
    """
    if not (num_reservations or start_slots) or state.claims.claims or state.lower_tier is not None:
        return False
    seqs, num_wanted = state.sequences, num_reservations + num_new + state.num_spare()
    for slot in start_slots:
        num_wanted += seqs.num_blocks(int(seqs.num_tokens[slot]))
    return num_wanted <= len(state.pool.free)
