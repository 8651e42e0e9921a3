"""Captured steps of two ranks, which are processes that meet over gloo, interpreted: the tokens and launches of one rank.

Both capture the same in the same order, since each capture has what they do together in it. A replay is one on both.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from kvkeeper.engine_service.compute.graphs import graphed_steps
from kvkeeper.engine_service.compute.model_runner import StepBounds
from kvkeeper.engine_service.compute.step_compute import StepCompute, StepRows
from kvkeeper.engine_service.model.split import WHOLE, Split
from kvkeeper.engine_service.ranks.meeting import Meeting
from kvkeeper.engine_service.ranks.messages import Kind, Pipe, PipeEnded, RankLost, decode_batch
from kvkeeper.engine_service.ranks.ranked_runner import RankedRunner
from kvkeeper.engine_service.values.sampling_params import LIKELIEST
from tests.support.models.tiny_models import build_model_folder, random_tokens
from tests.support.processes import recording_rank
from tests.support.processes.recording_rank import make_runner
from tests.support.stand_ins.host_reads import HostReads
from tests.support.stand_ins.late_queue import LateQueue
from tests.support.stand_ins.recorded_graphs import RecordedGraphs, RecordedTogether
from tests.support.worlds.batches import ScheduledRow, build_batch, decode_work
from tests.unit.kernels.gpu.captured import QWEN3, all_claim_to_be_on_cuda

__all__ = ["all_claim_to_be_on_cuda"]  # a fixture of the tests here
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")

BLOCK_SIZE, NUM_BLOCKS, NUM_STEPS, NUM_LAYERS = 16, 4, 3, 1
BOUNDS = StepBounds(2, 2 * BLOCK_SIZE, most_step_tokens=8)
PROMPTS = [random_tokens(3, 1), random_tokens(5, 2)]
TABLES = [np.array([1], np.int32), np.array([2], np.int32)]
ROWS = np.arange(2)
MEETINGS = ["share", "add_up", *["add_up"] * 2 * NUM_LAYERS, "gather"]


class OtherRank:
    """Stands for Ranks: one other rank, a process. messages: what was sent to it, once it has joined."""

    def __init__(self, folder: Any, meeting: Meeting, store: Any, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        words = str(theirs.fileno()), str(folder), str(NUM_BLOCKS), str(BLOCK_SIZE)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", recording_rank.__name__, *words],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment},
            )
        self._pipe, self._meeting, self.messages = Pipe(ours), meeting, list[tuple[Kind, bytes]]()
        self._pipe.receive(60.0)
        self._pipe.send(Kind.JOIN, json.dumps({"path": str(store)}).encode())
        meeting.join(store, 0, torch.device("cpu"), 60.0)
        self.hear()

    def send_all(self, kind: Kind, body: bytes = b"") -> None:
        self.messages.append((kind, body))
        self._pipe.send(kind, body)

    def hear(self) -> list[bytearray]:
        try:
            return [self._pipe.receive(60.0)[1]]
        except PipeEnded as error:
            raise RankLost(str(error)) from None

    def lose(self, why: str, *, is_ours: bool) -> RankLost:
        return RankLost(why)

    def stop(self) -> None:
        self._pipe.close()
        self._meeting.leave()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def folder(tmp_path):
    few = {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2}  # for the interpreter's time
    return build_model_folder(tmp_path / "model", replace(QWEN3, overrides=QWEN3.overrides | few))


@pytest.fixture(autouse=True)
def _cold(monkeypatch):
    """Captures come without the steps before them, which have tests of their own."""
    monkeypatch.setattr("kvkeeper.engine_service.compute.model_runner.warm_up_batches", lambda *args, **options: ())
    monkeypatch.setattr(graphed_steps, "_draw", lambda made, *drawing: made)  # no rank meets another there


class World:
    """Two sequences from their prompts on, each step launched before the one before it is read; the likeliest tokens."""

    def __init__(self, folder, graphs, split=WHOLE, ranks=None):
        self.graphs, self.queue, self.reads = graphs, LateQueue(), HostReads()
        self.own = make_runner(folder, NUM_BLOCKS, BLOCK_SIZE, split)
        self.own.queue = self.queue
        self.runner = self.own if ranks is None else RankedRunner(self.own, ranks)
        self.runner.make_ready(BOUNDS, graphs, with_retention=False, progress=False)
        self.compute = StepCompute(self.runner)
        self.tokens = []

    def run(self):
        before, waits = None, []
        for step in range(NUM_STEPS):
            lens = np.array([len(prompt) + step for prompt in PROMPTS], np.int32)
            if step:
                given = [ScheduledRow([0], int(length) - 1, table) for length, table in zip(lens, TABLES, strict=True)]
            else:
                given = [ScheduledRow(prompt, 0, table) for prompt, table in zip(PROMPTS, TABLES, strict=True)]
            batch = replace(build_batch(given, BLOCK_SIZE), rows=ROWS, awaited_rows=ROWS if step else None)
            work = replace(decode_work(batch, lens, is_awaited=step > 0), sampled=[None] * 2)
            with self.reads.watched():
                flight = self.compute.launch(work, StepRows([LIKELIEST] * 2, []))
            for each in [before] if before is not None else []:
                self.read(each)
            waits.append(self.queue.num_blocked)
            before = flight
        self.read(before)
        assert waits == list(range(NUM_STEPS)), "for the mark of each step that is read"
        return self.tokens

    def read(self, flight):
        computed = flight.read()
        assert computed is not None
        self.tokens.append(computed.sampled.token_ids.tolist())


@pytest.fixture
def meeting():
    made = Meeting(2)
    yield made
    made.leave()


def test_captured_steps_of_two_ranks_give_the_tokens_of_one_and_run_ahead(folder, tmp_path, meeting):
    alone = World(folder, RecordedGraphs())
    expected = alone.run()
    graphs = RecordedGraphs()
    together = RecordedTogether(meeting, graphs)
    ranks = OtherRank(folder, meeting, tmp_path / "store")
    try:
        world = World(folder, graphs, Split(0, 2, together), ranks)
        num_met = together.num_met
        assert world.run() == expected
        replays = (world.own.graphed.num_replays, world.own.graphed.num_with_prompts)
        assert replays == (alone.own.graphed.num_replays, alone.own.graphed.num_with_prompts) == (NUM_STEPS, 1)
        assert (world.reads.count, world.queue.most_waiting) == (0, 2)
        asked = [kind for kind, _ in ranks.messages]
        assert asked == [Kind.MAKE_READY, Kind.CAPTURE, *[Kind.REPLAY] * NUM_STEPS]
        for _, body in ranks.messages[3:]:
            assert not decode_batch(bytearray(body)).token_ids.any(), "the host does not know them"
        assert together.num_met - num_met == NUM_STEPS * len(MEETINGS)
        captured = [(graph.kernels, graph.meetings) for graph in graphs.graphs]
        steps = [kernels for kernels, meetings in captured if meetings]
        assert all(meetings in ([], MEETINGS) for _, meetings in captured)
        assert [len(kernels) for kernels in steps] == [len(graph.kernels) for graph in alone.graphs.graphs[: len(steps)]]
        assert len(captured) == len(alone.graphs.graphs), "the first rank draws"
    finally:
        ranks.stop()


@pytest.mark.in_turn
def test_what_one_rank_cannot_capture_none_has_and_steps_are_computed_without(folder, tmp_path, meeting):
    graphs = RecordedGraphs()
    ranks = OtherRank(folder, meeting, tmp_path / "store", **{recording_rank.FAILS_AT: "2"})
    try:
        with capture_logs() as logs:
            world = World(folder, graphs, Split(0, 2, RecordedTogether(meeting, graphs)), ranks)
        (failed,) = [line for line in logs if line["event"] == "graphs_failed"]
        assert "--no-graphs" in failed["message"]
        assert world.own.graphed is None
        assert world.run() == World(folder, None).run()
        assert {kind for kind, _ in ranks.messages[2:]} == {Kind.FORWARD}
    finally:
        ranks.stop()


@pytest.mark.in_turn
def test_a_rank_that_captures_in_another_order_is_noticed(folder, tmp_path, meeting):
    """It does other things together than the first rank does, at the latest when that has captured all."""
    graphs = RecordedGraphs()
    ranks = OtherRank(folder, meeting, tmp_path / "store", **{recording_rank.SWAPS: "1"})
    try:
        with pytest.raises(RankLost):
            World(folder, graphs, Split(0, 2, RecordedTogether(meeting, graphs)), ranks)
    finally:
        ranks.stop()
