"""Cached blocks between the tiers: demotion of what is evicted, promotion on a hit, loads that fail or lose their session."""

from kvkeeper.cache_service.core.values.types import BlockState, ItemResult, SequenceState, StartResult
from tests.support.tiers.tier_pool import TierPool, cached, demoted, push_out
from tests.support.worlds.core_pool import ALL, B, int32


def test_what_is_evicted_is_demoted_and_a_hit_brings_it_back() -> None:
    pool = TierPool(num_blocks=4, num_host_blocks=9)
    written = cached(pool, 1, range(12))
    ids = push_out(pool, 12)
    assert len(ids) == 3
    assert pool.manager.queries.stats().num_demoted_blocks == 3
    pool.create(2, range(12))
    reply = pool.step(starts=[(2, ALL, ALL)])
    assert reply.start_results.tolist() == [StartResult.LOADING]
    assert (reply.start_hits.tolist(), reply.start_reserved.tolist(), reply.start_num_blocks.tolist()) == ([8], [0], [0])
    assert len(reply.transfer_ids) == 2  # a token is left to compute
    ready = pool.step(done=pool.run(reply))
    assert (ready.ready_ids.tolist(), ready.ready_hits.tolist(), ready.ready_reserved.tolist()) == ([2], [8], [12])
    assert pool.bytes(2)[:2] == written[:2]
    assert pool.counters(2) == (12, 8, 12)
    assert pool.manager.queries.stats().num_promoted_blocks == 2
    assert pool.matched(range(12))[:2] == pool.table(2)[:2]


def test_a_copy_on_its_way_is_no_hit() -> None:
    pool = TierPool(num_blocks=4)
    cached(pool, 1, range(12))
    ids = push_out(pool, 12, report=False)
    assert pool.matched(range(12)) == []
    pool.step(B, done=ids)
    assert pool.matched(range(12)) == [0, 0, 0]  # in the host tier only


def test_a_demotion_that_fails_forgets_the_block_and_what_is_below() -> None:
    pool = TierPool(num_blocks=4)
    cached(pool, 1, range(12))
    ids = push_out(pool, 12, report=False)
    pool.step(B, done=ids[:1] + ids[2:], failed=ids[1:2])
    assert len(pool.matched(range(12))) == 1
    assert pool.manager.queries.stats().num_cached_host_blocks == 1


def test_r8_a_load_that_failed_leaves_its_tenants_content_to_no_other() -> None:
    """The block was another tenant's before, and comes back to it: torn, with what the load has brought so far."""
    pool = TierPool(num_blocks=4)
    pool.prefill(1, range(12), tenant="blue")
    pool.step(releases=[1])
    pool.create(2, range(100, 112), tenant="red")
    pool.step(done=pool.run(pool.step(starts=[(2, ALL, 0)])))
    pool.release(2)
    pool.create(3, range(12), tenant="blue")
    loads = pool.step(starts=[(3, ALL, ALL)])
    assert loads.start_results.tolist() == [StartResult.LOADING]
    pool.run(loads)
    pool.step(failed=loads.transfer_ids.tolist(), releases=[3])
    pool.step()
    pool.create(4, range(200, 212), tenant="red")
    reply = pool.step(starts=[(4, ALL, 0)])
    cleared = reply.copy_destinations[reply.copy_sources == 0].tolist()
    assert set(loads.transfer_destinations.tolist()) <= set(cleared)


def test_the_victim_may_be_granted_in_the_step_that_demotes_it() -> None:
    pool = TierPool(num_blocks=4)
    blocks = pool.prefill(1, range(12))
    pool.release(1)
    pool.create(2, range(100, 112))
    reply = pool.step(starts=[(2, ALL, 0)])
    assert sorted(reply.transfer_sources.tolist()) == sorted(reply.start_block_ids.tolist()) == sorted(blocks)


def test_a_copy_that_is_there_already_is_not_made_again() -> None:
    pool = demoted(range(12), num_blocks=5)
    pool.create(2, range(12))
    pool.step(done=pool.run(pool.step(starts=[(2, ALL, ALL)])))
    pool.release(2)
    assert push_out(pool, 16, sequence_id=51) == []
    assert len(pool.matched(range(12))) == 3


def test_a_full_host_tier_forgets_its_own_least_recently_used_first() -> None:
    pool = TierPool(num_blocks=3, num_host_blocks=3)
    cached(pool, 1, range(4))
    cached(pool, 2, range(100, 104))
    push_out(pool, 8)
    cached(pool, 3, range(200, 204))
    push_out(pool, 8, sequence_id=51)
    assert [len(pool.matched(range(first, first + 4))) for first in (0, 100, 200)] == [0, 1, 1]
    assert pool.manager.queries.stats().num_evicted_host_blocks >= 1


def test_where_swapped_sequences_fill_the_host_tier_what_is_evicted_is_forgotten() -> None:
    pool = TierPool(num_blocks=4, num_host_blocks=3)
    pool.prefill(1, range(8))
    pool.swap_out(1)
    pool.manager.prefixes.clear()
    cached(pool, 2, range(100, 112))
    assert push_out(pool, 12) == []
    assert pool.matched(range(100, 112)) == []
    assert pool.view(1).num_host_blocks == 2


def test_a_load_that_fails_becomes_a_shorter_hit() -> None:
    pool = demoted(range(12), num_blocks=7)
    pool.create(2, range(13))
    ids = pool.step(starts=[(2, ALL, ALL)]).transfer_ids.tolist()
    reply = pool.step(done=[ids[0], ids[2]], failed=[ids[1]])
    assert (reply.ready_hits.tolist(), reply.ready_reserved.tolist()) == ([4], [4])
    assert pool.step(reserves=[(2, 13, 13)]).reserve_reserved.tolist() == [13]
    assert pool.step(reserves=[(2, 13, 13)]).copy_sources.tolist() == []


def test_what_a_dead_session_was_saving_is_forgotten_and_kept_from_reuse() -> None:
    pool = TierPool(num_blocks=4)
    cached(pool, 1, range(12))
    pool.create(2, range(100, 112), session=B)
    reply = pool.step(B, starts=[(2, ALL, 0)])
    hosts = reply.transfer_destinations.tolist()
    pool.manager.sessions.close(B, may_still_write=True)
    pool.audit()
    assert pool.matched(range(12)) == []
    host = pool.manager.swapper.host.pool
    assert {host.state(block) for block in hosts} == {BlockState.QUARANTINED}
    pool.manager.sessions.end_quarantine(B)
    pool.audit()
    assert {host.state(block) for block in hosts} == {BlockState.FREE}


def test_releasing_a_loading_sequence_frees_its_blocks_at_completion_and_keeps_what_was_loaded() -> None:
    pool = demoted(range(8), num_blocks=7)
    pool.create(2, range(9))
    reply = pool.step(starts=[(2, ALL, ALL)])
    loads = reply.transfer_destinations.tolist()
    pool.release(2)
    pool.step()
    assert {pool.state(block) for block in loads} == {BlockState.IN_TRANSFER}
    pool.step(done=pool.run(reply))
    assert {pool.state(block) for block in loads} == {BlockState.CACHED}
    assert pool.matched(range(8)) == loads


def test_without_room_to_load_a_start_takes_the_shorter_hit() -> None:
    pool = demoted(range(12), num_blocks=5)
    pool.create(9, range(900, 910), session=B)
    assert pool.step(B, starts=[(9, 10, 0)]).start_results.tolist() == [StartResult.STARTED]
    pool.create(2, range(13))
    reply = pool.step(starts=[(2, 4, ALL)])
    assert (reply.start_results.tolist(), reply.start_hits.tolist()) == ([StartResult.STARTED], [0])
    assert not len(reply.transfer_ids)


def test_a_swapped_sequence_s_copies_serve_hits_too() -> None:
    pool = TierPool(num_blocks=6)
    pool.prefill(1, range(8))
    written = pool.fill(1)
    pool.swap_out(1)
    push_out(pool, 20)
    pool.create(2, range(9))
    reply = pool.step(starts=[(2, ALL, ALL)])
    pool.step(done=pool.run(reply))
    assert pool.bytes(2)[:2] == written
    swap_in = pool.step(ins=[1])  # and what the hit loaded serves the swap-in
    assert (swap_in.swap_in_results.tolist(), len(swap_in.transfer_ids)) == ([ItemResult.OK], 0)
    assert pool.bytes(1) == written


def test_an_admission_counts_a_block_for_what_is_to_be_loaded() -> None:
    pool = demoted(range(8), num_blocks=7)
    answer = pool.manager.admission.check("", int32(range(9)), 0, 1)
    assert (answer.num_hit_tokens, answer.num_required_blocks, answer.can_now) == (8, 3, True)


def test_loads_keep_their_copies_while_they_make_room() -> None:
    pool = TierPool(num_blocks=3, num_host_blocks=3)
    written = cached(pool, 1, range(8))
    push_out(pool, 8)
    cached(pool, 2, range(100, 108))
    pool.create(3, range(8))
    reply = pool.step(starts=[(3, 4, ALL)])  # to load is to evict, and to evict is to demote, into a full host tier
    pool.step(done=pool.run(reply))
    assert pool.state_of(3) is SequenceState.RUNNING
    assert pool.counters(3)[1] in (0, 4)
    if pool.counters(3)[1]:
        assert pool.bytes(3)[0] == written[0]
