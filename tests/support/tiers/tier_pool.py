"""A pool of the core with a host tier, for tests that say what happens; the blocks of both tiers hold one number each.

Owns the bytes: `step` runs no orders by itself; `run` does, and a block that was never filled holds 0.
"""

from collections.abc import Sequence

import numpy as np

from kvkeeper.cache_service.core.values.step_columns import StepReply
from kvkeeper.cache_service.core.values.types import SequenceState, SessionId, StartResult, TransferKind
from tests.support.worlds.core_pool import ALL, A, B, CorePool, step_batch


def int64(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


class TierPool(CorePool):
    """Sessions a and b step as engines do."""

    def __init__(self, num_blocks: int = 9, block_size: int = 4, num_host_blocks: int = 9, **config: object) -> None:
        super().__init__(num_blocks, block_size, num_host_blocks=num_host_blocks, **config)
        self.device = [0] * num_blocks
        self.host = [0] * num_host_blocks

    def step(  # type: ignore[override]
        self,
        session: SessionId = A,
        *,
        lag: int = 0,
        outs: Sequence[int] = (),
        ins: Sequence[int] = (),
        done: Sequence[int] = (),
        failed: Sequence[int] = (),
        **items: Sequence[object],
    ) -> StepReply:
        step_id = self.step_ids[session] + 1
        batch = step_batch(step_id, step_id - 1 - lag, **items)  # type: ignore[arg-type]
        reply = self.manager.steps.step(
            session,
            batch._replace(
                swap_out_ids=int64(outs),
                swap_in_ids=int64(ins),
                completed_transfers=int64(done),
                failed_transfers=int64(failed),
            ),
        )
        self.step_ids[session] = step_id
        self.audit()
        self.manager.maintenance.publish_pending()
        self.audit()
        return reply

    def run(self, reply: StepReply) -> list[int]:
        """Runs the orders of a reply. Returns their ids."""
        columns = (reply.transfer_kinds.tolist(), reply.transfer_sources.tolist(), reply.transfer_destinations.tolist())
        for kind, source, destination in zip(*columns, strict=True):
            if kind == TransferKind.SWAP_OUT:
                self.host[destination] = self.device[source]
            else:
                self.device[destination] = self.host[source]
        return [int(order_id) for order_id in reply.transfer_ids]

    def fill(self, sequence_id: int, *, session: SessionId = A) -> list[int]:
        """Writes something into each block of a sequence. Returns what."""
        table = self.table(sequence_id, session=session)
        for place, block in enumerate(table):
            self.device[block] = 100 * sequence_id + place + 1
        return self.bytes(sequence_id, session=session)

    def bytes(self, sequence_id: int, *, session: SessionId = A) -> list[int]:
        """What a sequence reads through its table."""
        return [self.device[block] for block in self.table(sequence_id, session=session)]

    def swap_out(self, sequence_id: int, *, session: SessionId = A) -> StepReply:
        """Swaps out, runs the orders and reports them."""
        reply = self.step(session, outs=[sequence_id])
        self.step(session, done=self.run(reply))
        return reply

    def state_of(self, sequence_id: int, *, session: SessionId = A) -> SequenceState:
        return self.view(sequence_id, session=session).state

    def scribble(self) -> None:
        """A block on no table of a running sequence, and not cached, loses what it held."""
        for block in range(1, len(self.device)):
            if self.state(block).value == "free":
                self.device[block] = 0


def cached(pool: TierPool, sequence_id: int, tokens: range) -> list[int]:
    """Computes a prompt and leaves it cached. Returns what its blocks hold."""
    pool.prefill(sequence_id, tokens)
    written = pool.fill(sequence_id)
    pool.step(releases=[sequence_id])
    pool.step()
    return written


def push_out(pool: TierPool, num_tokens: int, *, sequence_id: int = 50, report: bool = True) -> list[int]:
    """Another sequence takes all blocks, runs the orders that this causes, and goes. Returns the order ids."""
    pool.create(sequence_id, range(1000 * sequence_id, 1000 * sequence_id + num_tokens), session=B)
    reply = pool.step(B, starts=[(sequence_id, ALL, 0)])
    assert reply.start_results.tolist() == [StartResult.STARTED]
    ids = pool.run(reply)
    for block in pool.table(sequence_id, session=B):
        pool.device[block] = -1
    pool.step(B, releases=[sequence_id], done=ids if report else [])
    pool.step(B)
    pool.step(B)
    return ids


def demoted(tokens: range, num_blocks: int) -> TierPool:
    """A pool whose host tier alone has a prompt cached."""
    pool = TierPool(num_blocks)
    cached(pool, 1, tokens)
    push_out(pool, 4 * (num_blocks - 1))
    return pool
