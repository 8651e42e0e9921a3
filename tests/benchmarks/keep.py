"""A kept index: what it costs a step of the core, and how soon a killed service serves again with all that it had cached.

With digests a block costs the reading of its bytes once, beside the steps, and once more where a start verifies it; both are
told by the block. A host tier comes back with its pool.

Two pools take turns step by step, one with a kept index and one without. A step of growing sequences is told with its
publishing; the writing down runs every 50 ms, beside the steps, as in the service, and is told for each step, in processor
time. Nothing of RPC or engine is in it, so in the services a step costs more, and the writing is less beside it. The restart
is of a real process, from exec to "ready", killed with SIGKILL before. The pause of a restart under load is the longest time
that a stream of tokens stands still: killed and started again, and taken over by a service that was started beside it.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.kept_index import KeptIndex, KeptTable, Verification, row_words
from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.memory.kept.kept_pool import BlockDigests
from kvkeeper.cache_service.memory.kept.memory_directory import MemoryDirectory
from kvkeeper.client import AsyncEngineClient, GenerateOptions, Sampling
from tests.benchmarks.core_pool import CorePool
from tests.benchmarks.growing import BLOCK_SIZE, Growing
from tests.support.processes.fleet import fleet
from tests.support.worlds.memory_folder import memory_folder

_NUM_STEPS = 640
_WRITE_AFTER = 0.05  # seconds, as in the service
_SHM = "/dev/shm"
_NUM_STREAMS = 8
_CHAIN = 250  # blocks; a prompt of 4,000 tokens


def figures() -> Iterator[dict[str, object]]:
    for num_sequences in (1, 16, 256):
        yield {"case": "step", "sequences": num_sequences, **_step_costs(num_sequences)}
    for num_cached in (1_000, 100_000):
        yield {"case": "restart", "cached_blocks": num_cached, **_restart(num_cached)}
    for num_cached, num_hosts in ((1_000, 1_000), (50_000, 50_000)):
        yield {"case": "restart", "cached_blocks": num_cached, "host_blocks": num_hosts, **_restart(num_cached, num_hosts)}
    for block_kib in (16, 256, 2048):
        yield {"case": "digests", "block_KiB": block_kib, **_digest_costs(block_kib << 10)}
    for is_killed in (True, False):
        yield {"case": "streams over a kill" if is_killed else "streams over --take-over", **asyncio.run(_pause(is_killed))}


def _step_costs(num_sequences: int) -> dict[str, float]:
    pools = [_Pool(Growing(num_sequences), is_kept=is_kept) for is_kept in (False, True)]
    for step_idx in range(_NUM_STEPS):
        for pool in pools if step_idx % 2 else reversed(pools):
            pool.step(step_idx)
    plain, kept = (float(np.median(pool.steps)) * 1e6 for pool in pools)
    return {
        "plain_us": round(plain, 1),
        "kept_us": round(kept, 1),
        "share": round(kept / plain - 1, 4),
        "write_us_a_step": round(pools[1].writing / _NUM_STEPS * 1e6, 1),
    }


class _Pool:
    """One of the two. steps: seconds of each with its publishing; writing: seconds of processor time of all of it."""

    def __init__(self, load: Growing, *, is_kept: bool) -> None:
        self.steps: list[float] = []
        self.writing = 0.0
        self._load = load
        self._written_at = time.perf_counter()
        num_blocks = load.num_blocks(_NUM_STEPS)
        self._core = CorePool(PoolConfig(num_blocks, BLOCK_SIZE, max_sequences=load.num_sequences))
        if is_kept:
            self._core.manager.restore(kept_index(num_blocks), may_still_write=False)
        self._core.open()
        self._core.begin(load)

    def step(self, step_idx: int) -> None:
        batch = self._core.next_batch(**self._load.grow_columns(step_idx))
        begin = time.perf_counter()
        self._core.take(batch)
        self._core.publish()
        self.steps.append(time.perf_counter() - begin)
        if time.perf_counter() - self._written_at > _WRITE_AFTER:
            self._written_at, begin = time.perf_counter(), time.thread_time()
            while self._core.manager.record.write(1024):
                pass
            self.writing += time.thread_time() - begin


def kept_index(num_blocks: int) -> KeptIndex:
    """In memory of this process."""
    rows = np.zeros((num_blocks, row_words(BLOCK_SIZE)), np.int32)
    return KeptIndex(KeptTable(1, np.zeros(num_blocks, np.uint64), rows), None, (), lambda root, scope: True)


def _digest_costs(block_bytes: int) -> dict[str, float]:
    """For each block: what is added beside the steps, and what a start that verifies all takes more.

    The service maps the arena and has not read it before, so the first reading pays for that, too.
    """
    spec = KvSpec(b"bench", "bench", 1, 1, block_bytes // BLOCK_SIZE // 8, 4, BLOCK_SIZE)
    num_cached = max(_CHAIN, min(2_000, (1 << 30) // block_bytes) // _CHAIN * _CHAIN)
    written: dict[bool, float] = {}
    with memory_folder() as folder:
        for with_digests in (False, True):
            shutil.rmtree(folder, ignore_errors=True)
            written[with_digests] = _fill(folder, spec, num_cached + 8, num_cached, with_digests=with_digests)
        directory = MemoryDirectory(folder, keep=True)
        (kept,) = directory.open_pools()
        took: dict[bool, list[float]] = {False: [], True: []}
        for with_digests in (False, True) * 3:
            manager = PoolManager(PoolConfig(num_cached + 8, BLOCK_SIZE))
            how = Verification(BlockDigests(kept).of, 0, 0) if with_digests else None
            begin = time.perf_counter()
            result = manager.restore(kept.kept(), may_still_write=False, verification=how)
            took[with_digests].append(time.perf_counter() - begin)
            assert (result.num_blocks, result.num_damaged) == (num_cached, 0)
        kept.close()
        kept.device.arena.close()
        directory.close()
    return {
        "write_us_a_block": round(written[False] / num_cached * 1e6, 2),
        "write_with_digest_us_a_block": round(written[True] / num_cached * 1e6, 2),
        "verify_us_a_block": round((min(took[True]) - min(took[False])) / num_cached * 1e6, 2),
    }


def _restart(num_cached: int, num_hosts: int = 0) -> dict[str, object]:
    """Files with so many cached blocks, as a killed service leaves them; a service starts on them and is killed, 5 times."""
    spec = KvSpec(b"bench", "bench", 1, 1, 4, 4, BLOCK_SIZE)
    num_blocks, num_host_blocks = num_cached + 1000, num_hosts + 1000 if num_hosts else 0
    took, restored = [], []
    with tempfile.TemporaryDirectory(prefix="kvk-", dir=_SHM) as folder:
        _fill(Path(folder) / "memory", spec, num_blocks, num_cached, num_hosts=num_hosts)
        for _ in range(5):
            flags = ["--listen", f"unix:{folder}/s", "--runtime-dir", f"{folder}/run", "--num-blocks", str(num_blocks)]
            flags += ["--memory-dir", f"{folder}/memory", "--num-host-blocks", str(num_host_blocks)]
            begin = time.perf_counter()
            command = [sys.executable, "-m", "kvkeeper.cache_service", *flags]
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
                assert process.stderr is not None
                for line in process.stderr:
                    event = json.loads(line)
                    if event["event"] == "pool_restored":
                        restored.append(event)
                    if event["event"] == "ready":
                        break
                took.append(time.perf_counter() - begin)
                process.send_signal(signal.SIGKILL)
    found = {(event["num_blocks"], event["num_host_blocks"]) for event in restored}
    assert found == {(num_cached, num_hosts)} and len(restored) == len(took)
    return {
        "exec_to_ready_s": round(min(took), 2),
        "median_s": round(float(np.median(took)), 2),
        "restore_ms": min(event["milliseconds"] for event in restored),
    }


async def _pause(is_killed: bool) -> dict[str, float]:
    """The longest gaps of streams before a restart and over it, of five restarts."""
    before, over = [], []
    with memory_folder() as folder:
        flags = {"memory_dir": folder, "num_blocks": 4096, "max_tokens_per_sequence": 8192}
        async with fleet(1, flags, cache_switches=["--keep"]) as services:
            for _ in range(5):
                seen = [_Gaps() for _ in range(_NUM_STREAMS)]
                address = services.engine_addresses[0]
                tasks = [asyncio.create_task(gaps.follow(address, number)) for number, gaps in enumerate(seen)]
                await asyncio.sleep(1)
                before.append(max(gaps.take_longest() for gaps in seen))
                if is_killed:
                    await services.cache.kill()
                await services.start_cache(*([] if is_killed else ["--take-over"]))
                await services.engines[0].until("session_opened", services.engines[0].events["session_lost"] + 1)
                await asyncio.sleep(1)
                over.append(max(gaps.take_longest() for gaps in seen))
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "streams": _NUM_STREAMS,
        "longest_gap_before_ms": round(float(np.median(before)) * 1e3, 1),
        "longest_gap_ms": round(float(np.median(over)) * 1e3, 1),
        "worst_gap_ms": round(max(over) * 1e3, 1),
    }


class _Gaps:
    """The times between the tokens of one stream."""

    def __init__(self) -> None:
        self._longest, self._last = 0.0, 0.0

    async def follow(self, address: str, number: int) -> None:
        async with AsyncEngineClient(address) as client:
            sampling = Sampling(temperature=0, max_tokens=4000, ignore_eos=True)
            async for _ in client.generate([number, *range(10, 40)], GenerateOptions(sampling=sampling)):
                now = time.perf_counter()
                self._longest = max(self._longest, now - (self._last or now))
                self._last = now

    def take_longest(self) -> float:
        """Seconds, since the last time; the gap that goes on counts, too."""
        longest, self._longest = max(self._longest, time.perf_counter() - self._last), 0.0
        return longest


def _fill(
    path: Path, spec: KvSpec, num_blocks: int, num_cached: int, *, num_hosts: int = 0, with_digests: bool = False
) -> float:
    """A pool of chains of cached blocks, and others in the host tier. Returns the seconds that the writing down took."""
    num_host_blocks = num_hosts + 1000 if num_hosts else 0
    directory = MemoryDirectory(path, keep=True)
    kept = directory.make_pool(directory.allocate(num_blocks * spec.block_bytes), spec, num_blocks)
    if num_hosts:
        directory.add_hosts(kept, directory.allocate_host(num_host_blocks * spec.block_bytes), spec, num_host_blocks)
    manager = PoolManager(PoolConfig(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks))
    manager.restore(kept.kept(), may_still_write=False)
    index, rng = manager.state.index, np.random.default_rng(0)
    root = index.root("")
    for is_host, count in ((True, num_hosts), (False, num_cached)):
        for start in range(1, count + 1, _CHAIN):
            tokens = rng.integers(0, 32000, _CHAIN * BLOCK_SIZE).astype(np.int32)
            blocks = np.arange(start, start + _CHAIN, dtype=np.int32)
            nodes = index.insert_run(root, tokens, blocks)
            if is_host:
                index.add_hosts(nodes, blocks)
                index.note_filled(blocks)
                index.leave_device(blocks)
    digest = BlockDigests(kept).of if with_digests else None
    begin = time.perf_counter()
    while manager.record.write(1024, digest):
        pass
    took = time.perf_counter() - begin
    kept.close()
    for tier in kept.tiers:
        tier.arena.close()
    directory.close()
    return took
