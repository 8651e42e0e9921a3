"""`kvkeeper tiers`: what lies in which tier of each pool, and what moves between them."""

import argparse
from typing import Any

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.console.addresses import add_cache_flag, add_json_flag
from kvkeeper.cli.console.messages import as_json
from kvkeeper.cli.console.problems import EXIT_OK
from kvkeeper.cli.console.tables import table
from kvkeeper.cli.show.each_pool import print_pools, read_pools
from kvkeeper.cli.show.pool_counts import break_even, precision_text
from kvkeeper.cli.show.status import pool_line
from kvkeeper.common.service.sizes import size

_HEADERS = ("tier", "blocks", "size", "free", "cached", "held", "moving", "came", "evicted")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_cache_flag(parser)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """A table for each pool. Raises KvkeeperError."""
    print_pools(read_pools(args.cache), show_tiers, as_json, is_json=args.json)
    return EXIT_OK


def show_tiers(pool: Any) -> str:
    """One row for each tier that the pool has. `came`: blocks stored on the disk, demoted to the host, loaded to the device."""
    info: pb.PoolInfo = pool.pool
    num_blocks = max(info.num_blocks - 1, 0)
    held = pool.num_referenced_blocks + pool.num_fenced_blocks + pool.num_quarantined_blocks
    device = (pool.num_free_blocks, pool.num_cached_blocks, held, pool.num_transfer_blocks)
    rows: list[tuple[object, ...]] = [
        ("device", num_blocks, _bytes(info, num_blocks), *device, pool.num_promoted_blocks, pool.num_evicted_blocks)
    ]
    if info.num_host_blocks:
        num_blocks = info.num_host_blocks - 1
        host = (pool.num_free_host_blocks, pool.num_cached_host_blocks, pool.num_held_host_blocks, pool.num_busy_host_blocks)
        came = pool.num_demoted_blocks + pool.num_disk_hit_blocks + pool.num_remote_hit_blocks
        left = pool.num_evicted_host_blocks
        rows.append(("host", num_blocks, _bytes_below(info, num_blocks), *host, came, left))
    if info.num_disk_blocks:
        disk = (pool.num_free_disk_blocks, pool.num_cached_disk_blocks, 0, pool.num_busy_disk_blocks)
        came, left = pool.num_disk_stored_blocks, pool.num_evicted_disk_blocks
        rows.append(("disk", info.num_disk_blocks, _bytes_below(info, info.num_disk_blocks), *disk, came, left))
    if info.has_remote:  # what others have stored there is not known here
        rows.append(("remote", "-", "-", "-", "-", "-", "-", pool.num_remote_stored_blocks, "-"))
    lines = [pool_line(info), table(_HEADERS, rows)]
    if info.host_kv_dtype:
        lines.append(f"below the device K and V are kept in {precision_text(info)}")
    for name in (*(["disk"] if info.num_disk_blocks else ()), *(["remote"] if info.has_remote else ())):
        lines += [_traffic(pool, name), _worth(pool, name)]
    return "\n".join(lines)


def _traffic(pool: Any, name: str) -> str:
    read, written = getattr(pool, f"{name}_read_rate_bytes"), getattr(pool, f"{name}_write_rate_bytes")
    queued, rests = getattr(pool, f"num_queued_{name}_blocks"), getattr(pool, f"num_{name}_rests")
    return f"{name}: read {size(read)}/s, written {size(written)}/s, {queued:,} blocks queued, {rests:,} rests"


def _worth(pool: Any, name: str) -> str:
    first = 1000 * getattr(pool, f"{name}_first_byte_seconds")
    pays = break_even(getattr(pool, f"{name}_break_even_tokens"))
    num_unworthy = getattr(pool, f"num_unworthy_{name}_loads")
    computed = f"computing {pool.prefill_rate_tokens:,} tokens/s" if pool.prefill_rate_tokens else "computing not measured yet"
    return f"{name}: first byte after {first:,.1f} ms, {computed}: a load pays {pays}; {num_unworthy:,} were not worth it"


def _bytes(info: pb.PoolInfo, num_blocks: int) -> str:
    return size(num_blocks * info.block_bytes)


def _bytes_below(info: pb.PoolInfo, num_blocks: int) -> str:
    """The size of blocks in the host tier or behind it."""
    return size(num_blocks * (info.host_block_bytes or info.block_bytes))
