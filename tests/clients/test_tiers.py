"""`kvkeeper tiers` shows what lies in which tier."""

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.show.tiers import show_tiers

SPEC = pb.KvSpec(model_id="model", num_layers=1, num_kv_heads=1, head_dim=4, block_size=4)


def test_each_tier_has_a_row_with_its_blocks() -> None:
    info = pb.PoolInfo(num_blocks=11, num_host_blocks=21, num_disk_blocks=30, block_bytes=1024, spec=SPEC)
    pool = pb.PoolStats(pool=info, num_free_blocks=4, num_cached_blocks=6, num_free_host_blocks=20)
    pool.num_free_disk_blocks, pool.num_cached_disk_blocks, pool.num_busy_disk_blocks = 7, 21, 2
    pool.num_disk_stored_blocks, pool.num_evicted_disk_blocks, pool.disk_read_rate_bytes = 33, 3, 5 << 20
    rows = {line.split()[0]: line.split()[1:] for line in show_tiers(pool).splitlines() if line.split()}
    assert rows["device"] == ["10", "10", "KiB", "4", "6", "0", "0", "0", "0"]
    assert rows["host"] == ["20", "20", "KiB", "20", "0", "0", "0", "0", "0"]
    assert rows["disk"] == ["30", "30", "KiB", "7", "21", "0", "2", "33", "3"]
    assert "read 5 MiB/s" in show_tiers(pool)


def test_a_pool_shows_only_the_tiers_that_it_has() -> None:
    text = show_tiers(pb.PoolStats(pool=pb.PoolInfo(num_blocks=11, block_bytes=1024, spec=SPEC)))
    assert "device" in text
    assert "host" not in text
    assert "disk" not in text


def test_each_lower_tier_says_from_where_on_a_load_pays() -> None:
    info = pb.PoolInfo(num_blocks=11, num_host_blocks=21, num_disk_blocks=30, has_remote=True, block_bytes=1024, spec=SPEC)
    pool = pb.PoolStats(pool=info, prefill_rate_tokens=1500, disk_first_byte_seconds=0.0025, disk_break_even_tokens=64)
    pool.remote_break_even_tokens, pool.num_unworthy_remote_loads = 2**31 - 1, 7
    text = show_tiers(pool)
    assert "disk: first byte after 2.5 ms, computing 1,500 tokens/s: a load pays from 64 tokens on; 0 were" in text
    assert "remote: first byte after 0.0 ms, computing 1,500 tokens/s: a load pays never; 7 were" in text
    assert "a load pays not measured yet" in show_tiers(pb.PoolStats(pool=info))
