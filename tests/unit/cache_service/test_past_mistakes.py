"""Mistakes of earlier systems, as far as they could be made here. One test each, by its name there."""

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.values.errors import CacheError, DuplicateSequence, InvalidField, NeverFits, UnknownSequence
from kvkeeper.cache_service.core.values.types import BlockState, Executor, SequenceId, SessionId, StartResult
from kvkeeper.cache_service.rpc.convert.kv_spec import kv_spec
from kvkeeper.cache_service.runtime.lease import SessionTable
from tests.support.tiers.tier_pool import TierPool
from tests.support.worlds.core_pool import ALL, A, B, CorePool, int32


def all_blocks(pool: CorePool) -> list[int]:
    """Blocks that a new sequence of the whole pool gets: none is missing, none is there twice."""
    pool.step(B)
    pool.create(99, range(1000, 1000 + pool.manager.state.config.limit_tokens), session=B)
    return sorted(pool.step(B, starts=[(99, ALL, 0)]).start_block_ids.tolist())


def test_a_double_release_frees_nothing_twice() -> None:
    pool = CorePool(num_blocks=5)
    pool.prefill(1, range(6))
    pool.step(releases=[1])
    for _ in range(3):
        with pytest.raises(UnknownSequence):
            pool.step(releases=[1])
    assert all_blocks(pool) == [1, 2, 3, 4]


def test_a_second_create_under_the_same_id_leaks_nothing() -> None:
    pool = CorePool(num_blocks=5)
    pool.prefill(1, range(6))
    with pytest.raises(DuplicateSequence):
        pool.create(1, range(3))
    assert pool.counters(1) == (6, 6, 6)
    pool.step(releases=[1])
    assert pool.manager.queries.stats().num_running_sequences == 0
    assert all_blocks(pool) == [1, 2, 3, 4]


@pytest.mark.parametrize(("length", "reserved", "num_new"), [(6, 7, 0), (6, 8, 0), (6, 9, 1), (14, 20, 1)])
def test_copy_on_write_copies_the_block_that_is_written_and_no_other(length: int, reserved: int, num_new: int) -> None:
    """Also when no new block is needed."""
    pool = CorePool(num_blocks=17)
    blocks = pool.prefill(1, range(length))
    reply = pool.step(forks=[(1, 2, length)], reserves=[(2, reserved, reserved)])
    assert reply.copy_sources.tolist() == blocks[-1:]
    assert len(reply.new_block_ids) == num_new
    assert pool.table(2)[: len(blocks) - 1] == blocks[:-1]
    assert pool.table(2)[len(blocks) - 1] not in blocks


def test_id_0_is_refused_and_never_means_absent() -> None:
    pool = CorePool()
    with pytest.raises(InvalidField):
        pool.create(0, [1])
    pool.create(1, [1])
    reply = pool.step(starts=[(1, 1, 0)])
    assert 0 not in reply.start_block_ids  # block 0 is the null block
    for items in ({"releases": [0]}, {"reserves": [(0, 1, 1)]}, {"forks": [(0, 2, 1)]}, {"commits": [(0, 1, [])]}):
        with pytest.raises(CacheError):
            pool.step(**items)


def test_no_half_allocation_is_left_behind_by_a_failure() -> None:
    pool = CorePool(num_blocks=4)
    pool.prefill(1, range(4))
    pool.create(2, range(20, 30))
    with pytest.raises(CacheError):
        pool.manager.one_item.extend(A, SequenceId(2), 10, look_up=True)
    pool.audit()
    stats = pool.manager.queries.stats()
    assert (stats.num_free_blocks, stats.num_referenced_blocks, pool.table(2)) == (2, 1, [])


def test_nothing_past_the_length_can_be_read_or_shared() -> None:
    pool = CorePool()
    pool.prefill(1, range(6))
    pool.step(reserves=[(1, 12, 12)])
    pool.step(commits=[(1, 6, [6, 7])])  # told, and not computed
    for length in (7, 9):
        with pytest.raises(InvalidField):
            pool.step(forks=[(1, 2, length)])
    assert len(pool.matched(range(12))) == 1


def test_evicting_does_not_stop_at_or_run_over_blocks_that_a_fork_shares() -> None:
    pool = CorePool(num_blocks=9)
    held = pool.prefill(1, range(8))
    pool.step(forks=[(1, 2, 8), (1, 3, 8)])
    cached = pool.prefill(4, range(20, 28))
    pool.step(releases=[3, 4])
    assert pool.manager.evictions.evict_blocks(8) == 2  # all that can be freed, and the truth about it
    assert {pool.state(block) for block in cached} == {BlockState.FREE}
    assert pool.table(1) == pool.table(2) == held


def test_an_eviction_that_can_free_nothing_says_so() -> None:
    pool = CorePool(num_blocks=4)
    pool.prefill(1, range(8))
    assert pool.manager.evictions.evict_blocks(3) == 0
    pool.step(releases=[1])
    assert pool.manager.evictions.evict_blocks(1) == 0  # one is free already
    assert pool.manager.evictions.evict_blocks(2) == 1
    assert pool.manager.evictions.evict_blocks(1000) == 1


def test_references_of_prefix_hits_drop() -> None:
    pool = CorePool(num_blocks=9)
    cached = pool.prefill(1, range(9))[:2]
    for _ in range(5):
        pool.create(2, range(9), session=B)
        pool.step(B, starts=[(2, ALL, ALL)])
        pool.step(B, releases=[2])
    pool.step(releases=[1])
    assert {pool.state(block) for block in cached} == {BlockState.CACHED}
    assert pool.manager.evictions.evict_blocks(8) == 2


def test_the_hit_rate_knows_misses() -> None:
    pool = CorePool(num_blocks=17)
    pool.prefill(1, range(9))
    pool.prefill(2, range(50, 59))
    pool.prefill(3, range(9))
    pool.create(4, range(9))
    pool.step(starts=[(4, ALL, 0)])  # no look-up
    pool.create(5, range(100, 160))
    assert pool.step(starts=[(5, ALL, ALL)]).start_results.tolist() == [StartResult.STARTED]
    pool.create(6, range(9))
    for _ in range(3):  # refused ones are not looked up again and again
        assert pool.step(starts=[(6, ALL, ALL)]).start_results.tolist() == [StartResult.NO_ROOM]
    stats = pool.manager.queries.stats()
    assert (stats.num_starts, stats.num_look_ups, stats.num_hits) == (5, 4, 1)
    assert (stats.num_look_up_tokens, stats.num_hit_tokens, stats.num_refusals) == (87, 8, 3)


def test_a_request_that_can_never_fit_does_not_block_others() -> None:
    pool = CorePool(num_blocks=5)
    with pytest.raises(NeverFits):
        pool.create(1, range(17))
    assert pool.prefill(2, range(16))


def test_an_admission_answer_does_not_mix_up_free_blocks_and_head_room() -> None:
    pool = CorePool(num_blocks=11, watermark=0.3)
    pool.prefill(1, range(20))
    pool.step(releases=[1])
    pool.prefill(2, range(50, 66))
    # Ten blocks: four held, five cached, one free. Three stay free for those that run.
    answer = pool.manager.admission.check("", int32(range(100, 112)), 0, 0)
    assert (answer.num_available_blocks, answer.num_required_blocks, answer.can_now) == (3, 3, True)
    answer = pool.manager.admission.check("", int32(range(21)), 0, 0)  # hits five of the six: nothing left above the mark
    assert (answer.num_hit_tokens, answer.num_available_blocks, answer.can_now) == (20, 0, False)


def test_no_surplus_blocks_are_kept_after_trimming() -> None:
    pool = CorePool(num_blocks=9)
    pool.prefill(1, range(6))
    pool.step(reserves=[(1, 30, 30)])
    reply = pool.step(truncates=[(1, 6)])
    assert (len(pool.table(1)), reply.num_free) == (2, 6)
    reply = pool.step(truncates=[(1, 4)])
    assert (len(pool.table(1)), reply.num_free) == (1, 7)


def test_naming_a_sequence_counts_as_access() -> None:
    pool = CorePool()
    pool.prefill(1, range(6))
    before = pool.view(1).num_accesses
    pool.step(reserves=[(1, 7, 7)])
    assert pool.view(1).num_accesses == before + 1
    pool.create(2, range(6))
    pool.step(starts=[(2, ALL, ALL)])
    assert pool.view(2).num_accesses == 1
    pool.manager.updates.note_read(A, SequenceId(2))
    assert pool.view(2).num_accesses == 2


def test_the_sequence_being_extended_is_not_evicted_for_itself() -> None:
    pool = CorePool(num_blocks=5)
    pool.prefill(1, range(12))
    pool.step(reserves=[(1, 16, 16)])
    before = pool.table(1)
    assert pool.manager.evictions.evict_blocks(4) == 0
    pool.create(2, range(50, 54))
    assert pool.step(starts=[(2, ALL, 0)]).start_results.tolist() == [StartResult.NO_ROOM]
    assert pool.table(1) == before


def test_a_clock_that_stands_still_or_jumps_back_reaps_no_session() -> None:
    table = SessionTable(1, 4)
    session = table.open(SessionId("s"), Executor.ENGINE, 10.0, "", now=1000.0)
    for now in (1000.0, 500.0, -5.0, 1009.9):
        assert table.expired(now) == []
    assert table.expired(1010.0) == [session]


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [(pb.KV_DTYPE_FLOAT16, 2), (pb.KV_DTYPE_BFLOAT16, 2), (pb.KV_DTYPE_FLOAT32, 4)]
)
def test_a_block_weighs_k_and_v_of_all_layers(dtype: "pb.KvDtype", num_bytes: int) -> None:
    sizes = {"num_layers": 3, "num_kv_heads": 5, "head_dim": 7, "block_size": 16}
    spec = pb.KvSpec(model_id="m", layout=pb.KV_LAYOUT_BLOCK_MAJOR, kv_dtype=dtype, **sizes)
    assert kv_spec(spec).block_bytes == 2 * 3 * 5 * 7 * 16 * num_bytes


def test_what_was_swapped_under_an_id_is_not_what_its_next_owner_swaps_in() -> None:
    pool = TierPool(num_blocks=9, num_host_blocks=9)
    pool.prefill(1, range(6))
    pool.fill(1)
    pool.swap_out(1)
    other = pool.prefill(1, range(50, 56), session=B)  # another session's sequence of this id, in the slot beside it
    for block in other:
        pool.device[block] = 7
    assert pool.step(B, ins=[1]).transfer_ids.tolist() == []
    pool.step(releases=[1])
    pool.prefill(1, range(80, 86))  # and the same session's next one, in the same slot
    second = [11, 12]
    for block, content in zip(pool.table(1), second, strict=True):
        pool.device[block] = content
    pool.swap_out(1)
    pool.manager.prefixes.clear()
    pool.scribble()
    pool.step(done=pool.run(pool.step(ins=[1])))
    assert pool.bytes(1) == second
    assert pool.bytes(1, session=B) == [7, 7]
