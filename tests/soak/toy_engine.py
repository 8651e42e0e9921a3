"""An engine with a model that notices every wrong byte: batches, chunks, overlapping steps, preemption.

The K of token i is a hash of the whole prefix up to it, and the next token is a hash of all K read through the block table. So
a block that is wrong, stale, torn, shifted or another tenant's changes what is read, which is compared at once, and with it
every token behind. `continuation` says what must come out, with no cache at all.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepReply
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId, StartResult
from tests.support.worlds.core_pool import int32, step_batch
from tests.support.worlds.drivers import CoreDriver

Memory = npt.NDArray[np.int64]  # [num_blocks * block_size] the K of each slot

ALPHABET = 3


def contents(tenant: str, tokens: list[int]) -> list[int]:
    """The K of every token."""
    content = sum(tenant.encode())
    return [content := hash((content, token)) >> 3 for token in tokens]


def next_token(read: list[int]) -> int:
    return hash(tuple(read)) % ALPHABET


def continuation(tenant: str, prompt: list[int], max_new: int) -> list[int]:
    """What the model generates behind a prompt, computed without a cache."""
    tokens = list(prompt)
    for _ in range(max_new):
        tokens.append(next_token(contents(tenant, tokens)))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Trace:
    """One request: prompt and how many tokens to generate."""

    prompt: list[int]
    max_new: int
    tenant: str = ""
    is_looked_up: bool = True
    output: list[int] | None = None
    num_hits: int = 0  # starts that found something


@dataclass(eq=False)
class _Sequence:
    sequence_id: int
    trace: Trace
    tokens: list[int]
    num_known: int
    is_in_flight: bool = False
    computed: int = 0
    committed: int = 0
    table: list[int] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return len(self.tokens) == len(self.trace.prompt) + self.trace.max_new

    @property
    def num_left(self) -> int:
        return len(self.trace.prompt) + self.trace.max_new - len(self.tokens)


@dataclass
class _DeviceStep:
    step_id: int
    copies: list[tuple[int, int]]
    work: list[tuple[_Sequence, int, int, list[int]]]  # first and last position, the table as the step was given it


class ToyEngine:
    """One session. `submit` traces, then `step` until `is_idle`; outputs are checked as they end."""

    def __init__(self, driver: CoreDriver, memory: Memory, executor: Executor, rng: random.Random) -> None:
        self.driver = driver
        self.session: SessionId = driver.open_session(executor)
        self.num_finished = 0
        self.num_preempted = 0
        self.on_reply: Callable[[StepReply], object] = lambda reply: None
        self._executor = executor
        self._memory = memory.reshape(-1, driver.config.block_size)
        self._rng = rng
        self._most_running = rng.choice([2, 4, 8])
        self._is_short = False  # the last step could not grow everything, so none is started
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._done: list[int] = []  # to be released
        self._device: list[_DeviceStep] = []
        self._step_id = self._next_id = 0

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._running or self._done or self._device)

    def submit(self, trace: Trace, output: list[int] | None = None) -> None:
        tokens = trace.prompt + (output or [])
        self._next_id += 1
        sequence = _Sequence(self._next_id, trace, tokens, len(tokens))
        args = SequenceArgs(SequenceId(self._next_id), int32(tokens), len(trace.prompt) + trace.max_new, trace.tenant)
        self.driver.create_sequence(self.session, args)
        self._waiting.append(sequence)

    def step(self) -> None:
        """One iteration, behind which its device work may wait until the next one has been answered."""
        rng = self._rng
        overlapped = self._device and self._executor is Executor.ENGINE and rng.random() < 0.5
        if not overlapped:
            self.run_device()
        self._step_id += 1
        commits = []
        for q in self._running:
            if not q.is_in_flight and (q.computed > q.committed or len(q.tokens) > q.num_known):
                commits.append((q.sequence_id, q.computed, q.tokens[q.num_known :]))
                q.committed, q.num_known = q.computed, len(q.tokens)
        releases, self._done = self._done, []
        num_starts = 0 if self._is_short else rng.randint(0, self._most_running - min(len(self._running), self._most_running))
        starts = [(q.sequence_id, rng.randint(1, 8), 10_000 if q.trace.is_looked_up else 0)
                  for q in self._waiting[:num_starts]]  # fmt: skip
        wants = [q for q in self._running if not q.is_in_flight]
        targets = [min(len(q.tokens), q.computed + rng.choice([1, 2, 8])) for q in wants]
        batch = step_batch(
            self._step_id,
            self._step_id - 1 - bool(overlapped),
            commits=commits,
            releases=releases,
            starts=starts,
            reserves=[(q.sequence_id, q.computed + 1, target) for q, target in zip(wants, targets, strict=True)],
        )
        reply = self.driver.step(self.session, batch)
        self.on_reply(reply)
        if overlapped:
            self.run_device()
        self._take(reply, [item[0] for item in starts], wants, targets)
        if rng.random() < 0.7:
            self.run_device()
        if self.is_idle:
            self.driver.complete(self.session, self._step_id)

    def run_device(self) -> None:
        """All device work issued so far runs; what is read must spell the tokens."""
        for step in self._device:
            for source, destination in step.copies:
                self._memory[destination] = self._memory[source]
            for q, first, last, table in step.work:
                self._forward(q, first, last, table)
        self._device.clear()

    def _take(self, reply: StepReply, started: list[int], wants: list[_Sequence], targets: list[int]) -> None:
        copies = list(zip(reply.copy_sources.tolist(), reply.copy_destinations.tolist(), strict=True))
        if self._executor is Executor.CACHE:
            for source, destination in copies:
                self._memory[destination] = self._memory[source]
            copies = []
        step = _DeviceStep(self._step_id, copies, [])
        by_id = {q.sequence_id: q for q in self._running + self._waiting}
        for sequence_id, place, block in zip(
            reply.update_ids.tolist(), reply.update_table_idx.tolist(), reply.update_block_ids.tolist(), strict=True
        ):
            if sequence_id in by_id:  # or it has ended meanwhile, and is about to be released
                by_id[sequence_id].table[place] = block
        blocks = iter(reply.start_block_ids.tolist())
        for sequence_id, result, hit, reserved, count in zip(
            started, reply.start_results.tolist(), reply.start_hits.tolist(), reply.start_reserved.tolist(),
            reply.start_num_blocks.tolist(), strict=True,
        ):  # fmt: skip
            q = by_id[sequence_id]
            if result == StartResult.STARTED:
                assert hit < len(q.tokens), "a full hit leaves a token to compute"
                assert q.trace.is_looked_up or not hit
                q.trace.num_hits += hit > 0
                q.computed, q.committed, q.num_known = hit, hit, len(q.tokens)
                q.table = [next(blocks) for _ in range(count)]
                self._waiting.remove(q)
                self._running.append(q)
                self._issue(step, q, reserved)
        for item, block in zip(reply.new_block_item_idx.tolist(), reply.new_block_ids.tolist(), strict=True):
            wants[item].table.append(block)
        granted = reply.reserve_reserved.tolist()
        for q, target, reserved in zip(wants, targets, granted, strict=True):
            if reserved > q.computed:
                self._issue(step, q, min(reserved, target))
        self._is_short = any(reserved <= q.computed for q, reserved in zip(wants, granted, strict=True))
        if self._is_short and not self._running[-1].is_in_flight and self._rng.random() < 0.5:
            self._preempt(self._running[-1])
        self._device.append(step)

    def _issue(self, step: _DeviceStep, q: _Sequence, target: int) -> None:
        q.is_in_flight = True
        step.work.append((q, q.computed, target, list(q.table)))

    def _forward(self, q: _Sequence, first: int, last: int, table: list[int]) -> None:
        """Attends to what is there, writes what is new, and samples where the sequence has no more tokens."""
        size = self.driver.config.block_size
        row = self._memory[table].reshape(-1)
        wanted = contents(q.trace.tenant, q.tokens)
        read = row[:first].tolist()
        assert read == wanted[:first], f"sequence {q.sequence_id} reads other bytes than it wrote, of {first} tokens"
        for position in range(first, last):
            self._memory[table[position // size], position % size] = wanted[position]
        q.computed, q.is_in_flight = last, False
        if last == len(q.tokens) and not q.is_finished:
            q.tokens.append(next_token(read + wanted[first:last]))
            if q.is_finished:
                self._finish(q)

    def _finish(self, q: _Sequence) -> None:
        trace = q.trace
        trace.output = q.tokens[len(trace.prompt) :]
        assert trace.output == continuation(trace.tenant, trace.prompt, trace.max_new), "another output than without a cache"
        self.num_finished += 1
        self._running.remove(q)
        self._done.append(q.sequence_id)

    def _preempt(self, q: _Sequence) -> None:
        """Gives all back, and comes again as the first in the queue with the tokens it has."""
        self.num_preempted += 1
        self._running.remove(q)
        self._done.append(q.sequence_id)
        self.submit(q.trace, q.tokens[len(q.trace.prompt) :])
        self._waiting.insert(0, self._waiting.pop())
