"""Row 7: nothing is shared before it is committed.

One sequence goes from its creation to its last commit in small events. At every point between two of them it is aborted in
every way there is; what another session then hits for the same prompt must be what was committed, to the block, and must hold
the prompt, also when the aborted device work runs late.
"""

import random
from dataclasses import dataclass

import numpy as np

from kvkeeper.cache_service.core.values.types import SessionId
from tests.soak.row import Counts
from tests.soak.toy_engine import contents
from tests.support.worlds.core_pool import ALL, A, B, CorePool

Event = tuple[str, int]  # what, and up to which token
ABORTS = ("release", "truncate", "close", "die")
_NUM_BLOCKS = 24


@dataclass
class _Writer:
    """Session A with one sequence; events run its device work."""

    pool: CorePool
    prompt: list[int]
    memory: np.ndarray  # [num_blocks, block_size]
    committed: int = 0
    computed: int = 0
    reserved: int = 0

    def do(self, event: Event) -> None:
        what, length = event
        if what == "create":
            self.pool.create(1, self.prompt)
        elif what == "start":
            self.pool.step(A, starts=[(1, length, 0)])
            self.reserved = length
        elif what == "reserve":
            self.pool.step(A, reserves=[(1, length, length)])
            self.reserved = length
        elif what == "write":
            self.write(self.pool.table(1), length)
        else:
            self.pool.step(A, commits=[(1, length, [])])
            self.committed = length

    def write(self, table: list[int], length: int) -> None:
        size = self.memory.shape[1]
        content = contents("", self.prompt)
        for position in range(self.computed, length):
            self.memory[table[position // size], position % size] = content[position]
        self.computed = length


def life(rng: random.Random, num_tokens: int) -> list[Event]:
    """Create, start, and then chunks: reserved, written in two goes, committed in two goes, some of that late."""
    chunk = rng.randint(1, max(1, num_tokens))
    events: list[Event] = [("create", num_tokens), ("start", chunk)]
    done = 0
    while True:
        half = rng.randint(done, chunk)
        events += [("write", half), ("write", chunk), ("commit", half), ("commit", chunk)]
        done = chunk
        if done == num_tokens:
            return events
        chunk = rng.randint(done + 1, num_tokens)
        events.append(("reserve", chunk))


def run(seed: int) -> Counts:
    """Counts rounds, each of all points and all aborts; the fault is an abort with tokens reserved and not committed."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4])
    num_tokens = max(1, rng.randint(1, 3) * block_size + rng.choice([-1, 0, 1]))
    events = life(rng, num_tokens)
    faults = sum(_abort(events[:point], abort, block_size, num_tokens, rng)
                 for point in range(1, len(events) + 1) for abort in ABORTS)  # fmt: skip
    return Counts(1, faults)


def _abort(events: list[Event], abort: str, block_size: int, num_tokens: int, rng: random.Random) -> bool:
    pool = CorePool(_NUM_BLOCKS, block_size)
    prompt = [rng.randrange(2) for _ in range(num_tokens)]
    writer = _Writer(pool, prompt, np.full((_NUM_BLOCKS, block_size), -1, np.int64))
    for event in events:
        writer.do(event)
        _check_hit(pool, prompt, writer, 10 + len(pool.step_ids))
    table, in_flight = pool.table(1), writer.reserved > writer.committed
    is_running = writer.reserved > 0
    if abort == "release":
        pool.step(A, releases=[1])
    elif abort == "truncate" and is_running:
        pool.step(A, truncates=[(1, max(1, writer.committed))])
    elif abort in ("close", "die"):
        pool.manager.sessions.close(A, may_still_write=abort == "die")
    _check_hit(pool, prompt, writer, 20)
    if abort == "die" and is_running:  # the dead engine's step runs to its end
        writer.write(table, writer.reserved)
        _check_hit(pool, prompt, writer, 21)
        pool.manager.sessions.end_quarantine(A)
    _check_hit(pool, prompt, writer, 22)
    _check_no_leak(pool, abort)
    return in_flight


def _check_hit(pool: CorePool, prompt: list[int], writer: _Writer, sequence_id: int) -> None:
    """Session B hits the full committed blocks, no less and no more, and they hold the prompt."""
    size = writer.memory.shape[1]
    num_shared = writer.committed // size
    assert len(pool.matched(prompt)) == num_shared
    extended = [*prompt[: writer.reserved or 1], 1]  # one token behind, so that all that could be hit may be
    assert pool.create(sequence_id, extended, session=B) == num_shared * size
    reply = pool.step(B, starts=[(sequence_id, ALL, ALL)])
    assert reply.start_hits.tolist() == [num_shared * size], f"{reply.start_hits} tokens hit, {writer.committed} are committed"
    table = pool.table(sequence_id, session=B)[:num_shared]
    assert writer.memory[table].reshape(-1).tolist() == contents("", prompt)[: num_shared * size]
    _release(pool, B, sequence_id)


def _release(pool: CorePool, session: SessionId, sequence_id: int) -> None:
    pool.step(session, releases=[sequence_id])
    pool.step(session)


def _check_no_leak(pool: CorePool, abort: str) -> None:
    """With no session left, every block is free or cached."""
    if abort == "truncate":
        _release(pool, A, 1)
    elif abort == "release":
        pool.step(A)
    stats = pool.manager.queries.stats()
    held = (stats.num_referenced_blocks, stats.num_fenced_blocks, stats.num_quarantined_blocks)
    assert held == (0, 0, 0), f"referenced, fenced, quarantined: {held}"
