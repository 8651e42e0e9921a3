"""What tests of retention share: which table entries must be holes, and a sequence that grows."""

from tests.support.worlds.core_pool import ALL, B, CorePool

KEPT = [
    (0, 1),
    (0, 4),
    (0, 5),
    (1, 1),
    (1, 4),
    (3, 2),
    (4, 3),
    (4, 4),
    (5, 8),
    (9, 1),
]  # sinks and windows around the edges of blocks of 4


def holes(pool: CorePool, sequence_id: int) -> list[int]:
    return [idx for idx, block in enumerate(pool.table(sequence_id)) if block == 0]


def wholly_unread(length: int, sink: int, window: int) -> list[int]:
    """Table indices of the full blocks that hold no token of sink or window, one token at a time."""
    read = [i for i in range(length) if i < sink or i >= length - window]
    return [idx for idx in range(length // 4) if not any(i // 4 == idx for i in read)]


def grow(pool: CorePool, sequence_id: int, length: int, *, chunk: int = 1) -> None:
    """Reserves and commits chunk by chunk, making up tokens where the sequence has none."""
    while (committed := pool.counters(sequence_id)[1]) < length:
        target = min(length, committed + chunk)
        assert pool.step(reserves=[(sequence_id, target, target)]).reserve_reserved.tolist() == [target]
        new = range(target - pool.counters(sequence_id)[0])
        pool.step(commits=[(sequence_id, target, list(new))])


def all_blocks(pool: CorePool) -> list[int]:
    pool.step(B)
    pool.create(99, range(1000, 1000 + pool.manager.state.config.limit_tokens), session=B)
    return pool.step(B, starts=[(99, ALL, 0)]).start_block_ids.tolist()
