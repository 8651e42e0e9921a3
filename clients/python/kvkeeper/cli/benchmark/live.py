"""Replays a trace against a running cache service, as one client of it.

Opens a session with a KV spec of its own, so that it starts on an empty pool and shares blocks with no other client. However
the replay ends, it clears what it cached and closes the session. Each request takes three Steps: start, commit, release.
"""

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.console.problems import UsageFailure
from kvkeeper.client import CacheClient, CacheSession, CallOptions, StepItems

_COMPUTED_TOKEN = 2**31 - 1  # ends each prompt, so that all of the request before it can hit
_OPTIONS = CallOptions(timeout_s=30.0)


@dataclass(frozen=True, slots=True)
class LiveReplay:
    """The counts of a replay, and the pool that it ran on."""

    num_asked: int
    num_hits: int
    num_evicted: int
    step_seconds: list[float]
    pool: pb.PoolInfo


def replay(address: str, requests: Iterable[list[int]], longest: int, block_size: int) -> LiveReplay:
    """longest: blocks of the longest request. Raises UsageFailure where the pool cannot hold it, KvkeeperError."""
    spec = _spec(block_size)
    with CacheClient(address, _OPTIONS) as client:
        session = client.open_session(spec, client_name="bench trace")
        try:
            with session:
                _check_room(session.pool, longest, block_size)
                asked, hits, took = _run(session, requests, block_size)
                evicted = next(row.num_evicted_blocks for row in client.stats().pools if row.pool.spec == session.pool.spec)
        finally:
            with client.open_session(spec, client_name="bench trace") as cleaner:  # after the first one has ended
                cleaner.clear_prefix_cache()
        return LiveReplay(asked, hits, evicted, took, session.pool)


def _check_room(pool: pb.PoolInfo, longest: int, block_size: int) -> None:
    most_blocks = min((pool.max_tokens_per_sequence - 1) // block_size, pool.num_blocks - 2)
    if longest > most_blocks:
        raise UsageFailure(
            f"the service's pool takes requests of up to {most_blocks} blocks of {block_size} tokens, this trace has one of"
            f" {longest}; see --block-size, and --max-tokens-per-sequence and --num-blocks of the service"
        )


def _run(session: CacheSession, requests: Iterable[list[int]], block_size: int) -> tuple[int, int, list[float]]:
    """Blocks asked for, blocks that hit, seconds of each step."""
    asked = hits = 0
    took: list[float] = []

    def step(items: StepItems) -> np.ndarray:
        begin = time.perf_counter()
        answer = session.step(items)
        took.append(time.perf_counter() - begin)
        return answer.start_hits

    for number, request in enumerate(requests, 1):
        length = len(request) * block_size
        session.create_sequence(number, [*np.repeat(request, block_size).tolist(), _COMPUTED_TOKEN])
        ids, whole, none = np.array([number], np.int64), np.array([length], np.int32), np.zeros(1, np.int32)
        hits += int(step(StepItems(start_ids=ids, start_max_new=whole + 1, start_max_hit=whole))[0]) // block_size
        step(StepItems(commit_ids=ids, commit_lens=whole, commit_num_new=none))
        step(StepItems(release_ids=ids))
        asked += len(request)
    return asked, hits, took


def _spec(block_size: int) -> pb.KvSpec:
    """A spec with few bytes per token, because nothing is written to the pool."""
    return pb.KvSpec(
        model_id="kvkeeper-bench-trace",
        revision=secrets.token_hex(8),
        num_layers=1,
        num_kv_heads=1,
        head_dim=64,
        kv_dtype=pb.KV_DTYPE_FLOAT16,
        block_size=block_size,
        layout=pb.KV_LAYOUT_BLOCK_MAJOR,
        compute_dtype="float16",
    )
