"""Pins over the API, and the figures of GetStats that are worked out from others."""

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import BLOCK_BYTES, SPEC, Api, ManualClock, Session, refused, spec_of

TOKENS = range(8)  # two blocks


async def _cached(api: Api, sequence_id: int = 1) -> Session:
    """A session that has cached the tokens."""
    session = await api.open(engine=False, ttl_ms=60_000)
    await session.compute(sequence_id, len(TOKENS))
    await session.call("ReleaseSequence", sequence_id=sequence_id)
    return session


async def _pool_stats(api: Api) -> pb.PoolStats:
    await api.audit()
    (stats,) = (await api.stats()).pools
    return stats


async def test_a_pin_keeps_its_prefix_until_it_is_ended(api: Api) -> None:
    session = await _cached(api)
    pin = await session.call("PinPrefix", token_ids=TOKENS, ttl_ms=60_000)
    assert pin.num_pinned_tokens == 8
    assert len(pin.pin_id) == 32
    assert (await session.call("EvictBlocks", num_free_blocks=1 << 20)).num_evicted_blocks == 0
    stats = await _pool_stats(api)
    assert (stats.num_pins, stats.num_pinned_blocks, stats.num_referenced_blocks) == (1, 2, 2)
    await session.call("UnpinPrefix", pin_id=pin.pin_id)
    await refused(session.call("UnpinPrefix", pin_id=pin.pin_id), "UNKNOWN_PIN")
    assert (await session.call("EvictBlocks", num_free_blocks=1 << 20)).num_evicted_blocks == 2


async def test_two_pins_of_one_prefix_have_two_ids_and_nothing_has_none(api: Api) -> None:
    session = await _cached(api)
    pins = [await session.call("PinPrefix", token_ids=TOKENS, ttl_ms=1000) for _ in range(2)]
    assert pins[0].pin_id != pins[1].pin_id
    nothing = await session.call("PinPrefix", token_ids=[9, 9, 9, 9], ttl_ms=1000)
    assert (nothing.pin_id, nothing.num_pinned_tokens) == ("", 0)
    assert (await session.call("PinPrefix", token_ids=TOKENS, ttl_ms=1000, tenant="other")).pin_id == ""


async def test_the_service_ends_a_pin_when_its_time_is_over(api: Api, clock: ManualClock) -> None:
    session = await _cached(api)
    await session.call("PinPrefix", token_ids=TOKENS, ttl_ms=2500)
    clock.advance(2.0)
    assert (await _pool_stats(api)).num_pins == 1
    clock.advance(1.0)  # without a call: the pool ticks once a second
    stats = await _pool_stats(api)
    assert (stats.num_pins, stats.num_referenced_blocks, stats.num_cached_blocks) == (0, 0, 2)


async def test_a_lease_that_ends_takes_its_pins_along(api: Api, clock: ManualClock) -> None:
    await api.open(ttl_ms=60_000)
    session = await _cached(api)
    await session.call("PinPrefix", token_ids=TOKENS, ttl_ms=86_400_000)
    clock.advance(59.0)
    assert (await _pool_stats(api)).num_pins == 1
    clock.advance(2.0)
    assert (await _pool_stats(api)).num_pins == 0


async def test_a_pin_of_no_tokens_is_refused(api: Api) -> None:
    session = await _cached(api)
    await refused(session.call("PinPrefix", ttl_ms=1000), "INVALID_FIELD", field="token_ids")


async def test_misses_count_in_the_hit_rate(api: Api) -> None:
    session = await _cached(api)  # one look-up of 8 tokens that found nothing
    stats = await _pool_stats(api)
    assert (stats.num_look_ups, stats.num_hits, stats.num_misses, stats.hit_rate) == (1, 0, 1, 0.0)
    await session.create(2, 12)
    await session.call("ExtendSequence", sequence_id=2, num_tokens=12)
    stats = await _pool_stats(api)
    assert (stats.num_look_ups, stats.num_hits, stats.num_misses) == (2, 1, 1)
    assert stats.hit_rate == 8 / (8 + 12)
    await session.create(3, 4)
    await session.call("ExtendSequence", sequence_id=3, num_tokens=4, skip_look_up=True)
    assert (await _pool_stats(api)).hit_rate == 8 / 20  # a start without a look-up misses nothing


async def test_bytes_are_those_of_the_blocks_in_use(api: Api) -> None:
    by_hand = 2 * SPEC.num_layers * SPEC.num_kv_heads * SPEC.head_dim * SPEC.block_size * 4  # K and V, float32
    assert by_hand == BLOCK_BYTES
    session = await _cached(api)
    stats = await _pool_stats(api)
    assert (stats.used_bytes, stats.block_utilization) == (0, 0)
    assert stats.peak_used_bytes == 2 * by_hand
    await session.create(2, 11, first=50)
    await session.call("ExtendSequence", sequence_id=2, num_tokens=11)
    stats = await _pool_stats(api)
    assert (stats.used_bytes, stats.peak_used_bytes) == (3 * by_hand, 3 * by_hand)
    assert stats.block_utilization == 3 / (stats.pool.num_blocks - 1)
    assert stats.slot_utilization == 11 / 12
    other = await api.open(spec=spec_of(kv_dtype=pb.KV_DTYPE_BFLOAT16, num_layers=3), engine=False)
    await other.create(1, 4)
    await other.call("ExtendSequence", sequence_id=1, num_tokens=4)
    used = [pool.used_bytes for pool in (await api.stats()).pools]
    assert used == [3 * by_hand, by_hand // 2 * 3 // 2]
