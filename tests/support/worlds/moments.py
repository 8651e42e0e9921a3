"""What must hold of a pool at any moment, with anything in flight, and what the end of a session must leave.

Asked between two operations of a TierWorld; changes nothing. `check_contents`: all that could be found, or read by its owner,
is there right now. `check_crash`: an engine that dies continues with all that it was told to copy, load and write: none of it
may be in blocks that another session has, or could get. `check_residue`: what an engine was told and will never do has
left no other tenant's content behind where it would not be cleared (R8). The session ends in a twin of the pool.
"""

import copy

import numpy as np

from kvkeeper.cache_service.core.values.types import (
    UNKNOWN_TENANT,
    Executor,
    SequenceId,
    SequenceState,
    SessionId,
    TransferKind,
)
from tests.support.tiers.tier_world import TierWorld


def check_contents(world: TierWorld) -> None:
    size = world.config.block_size
    for session, engine in world.engines.items():
        for q in engine.sequences.values():
            spelled = world.spell(q, 0, len(q.tokens))
            blocks = world.manager.queries.match_prefix(q.scope, np.array(q.tokens, np.int32)).blocks.tolist()
            there = blocks[: blocks.index(0)] if 0 in blocks else blocks
            fault = world.memory.fault(f"what is cached of {q.id}", there, spelled[: len(there) * size])
            assert not fault, fault
            if q.state is not SequenceState.RUNNING:
                continue
            view, num_tokens = world.manager.queries.readable(session, SequenceId(q.id))
            for group, table in enumerate((view.block_table, *view.group_tables)):
                wanted = world.read(q, group, table.tolist(), world.spell(q, group, view.num_committed_tokens))[:num_tokens]
                fault = world.memory.fault(f"what is read of {q.id}, group {group}", table.tolist(), wanted)
                assert not fault, fault
            assert num_tokens == view.num_committed_tokens or engine.executor is Executor.ENGINE


def check_crash(world: TierWorld, session: SessionId) -> int:
    """Returns the number of blocks that the engine still fills or writes to."""
    twin = copy.deepcopy(world.manager)
    swapper = twin.swapper
    assert swapper is not None
    twin.sessions.close(session, may_still_write=True)
    device, host = in_flight(world, session)
    for name, pool, blocks in (("", twin.state.pool, device), ("host ", swapper.host.pool, host)):
        exposed = {block for block in blocks if not pool.quarantine_counts[block] or pool.indexed[block]}
        assert not exposed, f"{name}blocks {exposed} could be had, or are shared, while an engine that died writes them"
    assert not (wrong := twin.queries.check_invariants()), wrong
    twin.sessions.end_quarantine(session)
    assert not (wrong := twin.queries.check_invariants()), wrong
    return len(device) + len(host)


def check_residue(world: TierWorld, session: SessionId) -> int:
    """Returns the number of blocks that would be cleared for their next owner."""
    twin = copy.deepcopy(world.manager)
    twin.sessions.close(session, may_still_write=False)
    pool = twin.state.pool
    idle = (pool.ref_counts | pool.fence_counts | pool.busy_counts) == 0
    idle[0] = False
    for block in np.flatnonzero(idle).tolist():
        tenant = int(twin.state.allocator.last_tenants[block])
        for name, contents in world.written.items():
            if tenant != UNKNOWN_TENANT and twin.state.index.roots.find_tenant(name) != tenant:
                assert not contents.intersection(world.memory.device[block]), f"block {block} holds what {name!r} has written"
    return int(np.count_nonzero(twin.state.allocator.last_tenants[idle] == UNKNOWN_TENANT))


def in_flight(world: TierWorld, session: SessionId) -> tuple[set[int], set[int]]:
    """Device and host blocks that the session's work in flight fills or writes to."""
    device: set[int] = set()
    host: set[int] = set()
    for step in world.memory.in_flight.get(session, ()):
        for order in step.orders:
            (host if order.kind == TransferKind.SWAP_OUT else device).add(order.destination)
        device.update(destination for _, destination in step.copies)
        device.update(block for block, _, _ in step.writes)
    return device, host
