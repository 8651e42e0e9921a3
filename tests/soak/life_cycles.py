"""Row 3: nothing leaks. Life cycles of sequences over gRPC that finish, abort, get preempted, are cancelled or disconnected.

A service in this process, with its time moved by the unit, must hold nothing after each round, and in the end as many file
descriptors and tasks as after the warm-up. Memory is that of a service in a process of its own, and without cancelled calls:
grpcio 1.85.1 leaves about 250 bytes of each in a server that does nothing but answer, and 800 in the client.
"""

import asyncio
import contextlib
import os
import random
from pathlib import Path
from statistics import median

import grpc

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.soak.row import Counts
from tests.support.processes.cache_process import cache_process
from tests.support.worlds.cache_api import DEADLINE, Api, ManualClock, le32, le64, serving

_PER_ROUND = 24
_ROUNDS = 24
_WARM_UP_ROUNDS = 8
_NUM_SIZES = 20


class _Round:
    """One session with some sequences, from its opening to its end."""

    def __init__(self, api: Api, clock: ManualClock | None, rng: random.Random) -> None:
        self.api, self.clock, self.rng = api, clock, rng
        self.num_faults = 0  # requests that did not simply finish
        self._step_id = 0

    async def run(self) -> None:
        self.session = await self.api.open(engine=self.rng.random() < 0.5, ttl_ms=0 if self.clock else 500)
        ids = list(range(1, _PER_ROUND + 1))
        for sequence_id in ids:
            await self._create(sequence_id)
        await self._step(start_sequence_ids=le64(*ids), start_max_new_tokens=le32(*[64] * len(ids)),
                         start_max_hit_tokens=le32(*[64] * len(ids)))  # fmt: skip
        ends = [self.rng.choice(["finish", "finish", "abort", "preempt"]) for _ in ids]
        self.num_faults += sum(end != "finish" for end in ends)
        running = await self._running()
        finished = [i for i, end in zip(ids, ends, strict=True) if end == "finish" and i in running]
        await self._step(commit_sequence_ids=le64(*finished), commit_num_tokens=le32(*[running[i] for i in finished]),
                         commit_num_new_tokens=le32(*[0] * len(finished)))  # fmt: skip
        preempted = [i for i, end in zip(ids, ends, strict=True) if end == "preempt"]
        await self._step(release_sequence_ids=le64(*[i for i in ids if i not in preempted[::2]]))
        for sequence_id in preempted[1::2]:
            await self._create(1000 + sequence_id)
        await self._end()

    async def _running(self) -> dict[int, int]:
        """Reserved tokens, no more than were told, of what runs."""
        listed = await self.session.api.stub.ListSequences(
            pb.ListSequencesRequest(session_id=self.session.opened.session_id, page_size=1000), timeout=DEADLINE
        )
        return {info.sequence_id: min(info.num_reserved_tokens, info.num_tokens) for info in listed.sequences
                if info.state == pb.SEQUENCE_STATE_RUNNING}  # fmt: skip

    async def _create(self, sequence_id: int) -> None:
        tokens = [self.rng.randrange(2) for _ in range(self.rng.choice([3, 4, 5, 9]))]
        request = pb.CreateSequenceRequest(**self.session.ids, sequence_id=sequence_id, token_ids=tokens)
        if self.clock is not None and self.rng.random() < 0.1:
            await self._cancelled(self.api.stub.CreateSequence(request, timeout=DEADLINE))
        await self.api.stub.CreateSequence(request, timeout=DEADLINE)

    async def _step(self, **columns: bytes) -> None:
        """One step; sometimes its call is cancelled, and sent again with the same bytes."""
        self._step_id += 1
        raw = self.session.step_bytes(self._step_id, **columns)
        if self.clock is not None and self.rng.random() < 0.2:
            await self._cancelled(self.api.raw_step(raw, timeout=DEADLINE))
        await self.api.raw_step(raw, timeout=DEADLINE)

    async def _cancelled(self, call: grpc.aio.UnaryUnaryCall) -> None:
        self.num_faults += 1
        for _ in range(self.rng.randrange(8)):
            await asyncio.sleep(0)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call

    async def _end(self) -> None:
        """The session closes, loses its stream, or falls silent."""
        how = self.rng.choice(["close", "disconnect", "silence"])
        if self.clock is None and self.rng.random() < 0.9:  # real time passes slowly
            how = "close"
        self.num_faults += how != "close"
        if how == "close":
            await self.session.call("CloseSession", drained=self.rng.random() < 0.5)
            return
        if how == "disconnect":
            stream = self.api.raw_stream()
            await stream.write(self.session.step_bytes(self._step_id + 1))
            await stream.read()
            stream.cancel()
            if self.clock is not None:
                await self.api.until(lambda _: self._is_in_grace())
        if self.clock is not None:
            self.clock.advance(0.6 if how == "disconnect" else 10.1)

    def _is_in_grace(self) -> bool:
        return all(live.core.grace_deadline is not None for live in self.api.server.session_manager.sessions)


async def _rounds(api: Api, clock: ManualClock | None, rng: random.Random, count: int) -> int:
    """Rounds, each of which must leave nothing in the pool. Returns the faults."""
    num_faults = 0
    for _ in range(count):
        round_ = _Round(api, clock, rng)
        await round_.run()
        num_faults += round_.num_faults
        if clock is None:
            continue
        (pool,) = (stats := await api.stats()).pools
        held = (len(stats.sessions), pool.num_running_sequences, pool.num_waiting_sequences, pool.num_referenced_blocks,
                pool.num_fenced_blocks, pool.num_quarantined_blocks)  # fmt: skip
        assert held == (0, 0, 0, 0, 0, 0), f"sessions, running, waiting, referenced, fenced, quarantined: {held}"
    await api.audit()
    return num_faults


def _open_things() -> tuple[int, int]:
    """(file descriptors, tasks)"""
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())


async def run(seed: int) -> Counts:
    """Counts life cycles; the fault is one that did not simply finish."""
    rng = random.Random(seed)
    clock = ManualClock()
    async with serving(clock=clock, num_blocks=200, max_sequences=64) as api:
        await _rounds(api, clock, rng, _WARM_UP_ROUNDS)
        before = _open_things()
        num_faults = await _rounds(api, clock, rng, _ROUNDS)
        # Fewer than before are fine: what earlier work in this process left is collected meanwhile.
        await api.until(lambda _: all(now <= then for now, then in zip(_open_things(), before, strict=True)))
    return Counts(_PER_ROUND * _ROUNDS, num_faults)


async def memory(seed: int, num_sessions: int, num_warm_up: int, num_rounds: int, most: float) -> Counts:
    """Counts life cycles. A line through the sizes of the service, by the median of all slopes, says what a request leaves.

    The service remembers 4096 sessions that ended, and grows by that much at first. most: bytes.
    """
    rng = random.Random(seed)
    async with (
        cache_process("--num-blocks", "200", "--max-sequences", "4096", "--max-sessions", "256") as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        api = Api(None, channel)
        for _ in range(num_sessions):
            await (await api.open()).call("CloseSession")
        await _rounds(api, None, rng, num_warm_up)
        sizes, num_faults = [], 0
        for _ in range(_NUM_SIZES):
            num_faults += await _rounds(api, None, rng, num_rounds // _NUM_SIZES)
            sizes.append(_resident_bytes(service.process.pid))
        await api.until(lambda stats: not stats.sessions)
        await api.audit()
    slopes = [(sizes[j] - sizes[i]) / (j - i) for i in range(len(sizes)) for j in range(i + 1, len(sizes))]
    slope = median(slopes) / (num_rounds // _NUM_SIZES * _PER_ROUND)
    assert slope <= most, f"memory grows by {slope:.1f} bytes a request: {sizes}"
    return Counts(num_rounds * _PER_ROUND, num_faults)


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
