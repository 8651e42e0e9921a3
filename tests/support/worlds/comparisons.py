"""Comparing a tiny pool with the reference model and the content oracle around it.

Owns the comparisons, which change nothing; each raises Mismatch with the rule that is broken.
"""

from collections import Counter
from collections.abc import Iterable

from kvkeeper.cache_service.core.values.types import MatchEnd, SequenceId, SessionId
from tests.support.reference.naive_cache import Mismatch, expect, require
from tests.support.reference.naive_steps import NaiveSteps
from tests.support.reference.shadow_memory import Contents, Read, ShadowMemory
from tests.support.worlds.drivers import Driver
from tests.support.worlds.engine_model import int32, unread


def compare_views(driver: Driver, naive: NaiveSteps) -> None:
    """Each sequence as it is shown (R2)."""
    for (session, sequence_id), q in naive.sequences.items():
        view = driver.view(SessionId(session), SequenceId(sequence_id))
        found = (view.num_tokens, view.num_committed_tokens, view.num_reserved_tokens, view.block_table.tolist())
        expect(found, (len(q.tokens), q.committed, q.reserved, q.table), f"R2 sequence {sequence_id}")
        expect(len(q.table), naive.num_blocks(q.reserved), f"R2 table of {sequence_id}")
        expect(view.num_hit_tokens, q.hit, f"hit of {sequence_id}")
        expect(view.reuse_hint, q.hint, f"hint of {sequence_id}")
        expect(view.retention, q.retention, f"retention of {sequence_id}")
        expect((view.priority, view.start_number), (q.priority, q.start_number), f"age of {sequence_id}")


def compare_pool(driver: Driver, naive: NaiveSteps) -> None:
    """Block states and counts (R1)."""
    stats = driver.stats()
    pinned = {block for pin in naive.pins.values() for block in pin.blocks}
    expect((stats.num_pins, stats.num_pinned_blocks), (len(naive.pins), len(pinned)), "pins and pinned blocks")
    states = driver.block_states()
    if states is not None:
        expect(states, naive.states(), "R1 block states")
    waiting = [naive.classes.get(block, 0) for block in naive.ages]
    if states is not None or naive.sessions:  # without a session no call can ask what a service has evicted by itself
        expect(
            (stats.num_no_reuse_blocks, stats.num_soon_blocks),
            (waiting.count(-1), sum(each > 0 for each in waiting)),
            "blocks by hint",
        )
    if states is not None:
        expect({b: naive.class_of(b) for b in naive.ages}, {b: min(naive.classes.get(b, 0), 1) for b in naive.ages}, "classes")
    expect(stats.pressure, naive.pressure, "pressure")
    if states is not None:  # a service looks more often, at times that a test cannot know
        expect(stats.num_pressure_changes, naive.num_pressure_changes, "changes of pressure")
    missed: Counter[tuple[str, MatchEnd]] = Counter()
    for miss in stats.misses:
        missed[miss.tenant, MatchEnd(miss.cause)] += miss.num_tokens
    if states is not None:  # a service counts later, and may have forgotten of a block that came and went often
        expect(missed, naive.misses.tokens, "missed tokens by tenant and cause")
    expect(missed.total(), naive.misses.tokens.total(), "missed tokens")
    expect(
        (stats.num_claimed_blocks, stats.num_computing_answers),
        (naive.num_reserved(), naive.num_computing),
        "reserved, computing",
    )


def compare_contents(
    driver: Driver, naive: NaiveSteps, memory: ShadowMemory, contents: Contents, sessions: Iterable[SessionId]
) -> None:
    """What sequences read and what is indexed, against the contents of the blocks (R3, R4, R6)."""
    for session in sessions:
        reads = [Read(f"R3 sequence {q.sequence_id}", q.table, contents.spell(q.scope, q.tokens[: q.committed]),
                      unread(q.retention, q.committed))
                 for q in naive.of(session)]  # fmt: skip
        faults = memory.check(session, reads)
        require(not faults, f"R3: {faults}")
    size = driver.config.block_size
    anyone = next(iter(sessions), None)
    for (scope, tokens), block in naive.index.items():
        content = contents.spell(scope, list(tokens))
        if not memory.spells([block], content[-size:]):
            raise Mismatch(f"R6 block {block} is indexed and does not hold {tokens}")
        if anyone is not None:
            found = driver.match_prefix(anyone, scope, int32(list(tokens)))
            expect(found, naive.match(scope, list(tokens)), f"R4 match of {tokens}")
