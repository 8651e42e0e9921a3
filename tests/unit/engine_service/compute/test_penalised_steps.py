"""Penalised rows of steps that no graph draws, where the device counts their tokens: the tokens of whole histories.

Prompts come in chunks beside decodes, so that not every row of logits is drawn from; sequences come and go.
"""

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute import penalties, sampler
from kvkeeper.engine_service.compute.device.device_queue import HostQueue
from kvkeeper.engine_service.compute.device.token_counts import TokenCounts
from kvkeeper.engine_service.compute.model_runner import ModelRunner
from kvkeeper.engine_service.compute.step_compute import StepRows
from kvkeeper.engine_service.outputs.unread_tokens import Histories, SlotDraws
from kvkeeper.engine_service.values.sampling_params import PlainDraws, SamplingParams
from kvkeeper.kernels.penalise_counted import IN_PROMPT, ONE_MORE
from tests.support.stand_ins.late_queue import LateQueue
from tests.unit.engine_service.compute.test_late_device import NUM_NEW, Decoding, folder, model

__all__ = ["folder", "model"]  # fixtures of the tests here
WAYS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.2),
    SamplingParams(temperature=0, repetition_penalty=1.2, frequency_penalty=0.4),
]


class ByColumn(Decoding):
    """Three sequences whose draws are said by column, as the loop says them. num_slots: of counts on the device; 0: none."""

    def __init__(self, model, queue, num_slots, ranks=None):
        super().__init__(model, queue, ranks, chunk_size=4)
        self.draws, self.num_counted, self.num_partly = SlotDraws(), 0, 0
        for slot, params in enumerate(WAYS):
            self.draws.set(slot, params, seed=slot)
        runner = self.compute._runner if ranks is None else self.compute._runner._own
        assert isinstance(runner, ModelRunner)
        if num_slots:
            runner.counts = TokenCounts(num_slots, runner.vocab_size, 64, torch.device("cpu"))

    def rows(self, work):
        running, rows = self.scheduler.running, work.sample_rows
        known = running.num_tokens[rows], running.num_prompt[rows]
        histories = Histories(running.tokens, rows, *known, work.awaited, running.serials[rows])
        slots = np.array([int(sequence.request.request_id[1:]) for sequence in work.sampled], np.int64)
        self.num_partly += 0 < len(work.logit_idx) < len(work.rows)
        return StepRows(self.draws.rows(slots, histories) if len(rows) else [], [])

    def read(self, work, launched):
        computed = launched.read()
        assert computed is not None
        taken = self.scheduler.advance(work, computed.sampled.token_ids.astype(np.int32))
        for sequence, token_ids in zip(work.sampled, taken, strict=True):
            output = self.outputs[sequence.request.request_id]
            output += token_ids.tolist()
            if len(output) == sequence.request.max_new_tokens:
                self.scheduler.end_sequence(sequence)


@pytest.fixture(scope="module")
def expected(model):
    found = ByColumn(model, HostQueue(), 0).run(ahead=False)
    assert sorted(map(len, found.values())) == [NUM_NEW - 2, NUM_NEW - 1, NUM_NEW]
    return found


@pytest.mark.parametrize("queue", [HostQueue, LateQueue])
@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_are_those_of_whole_histories(model, expected, monkeypatch, queue, ahead):
    def no_histories(*_):
        raise AssertionError("a history was brought whole")

    monkeypatch.setattr(sampler, "penalised_logits", no_histories)
    late = ByColumn(model, queue(), 4)
    assert late.run(ahead=ahead) == expected
    assert late.num_partly, "a chunk of a prompt was beside a decode"
    assert not ahead or late.num_ahead >= NUM_NEW - 2


def test_without_slots_enough_histories_are_brought_now_and_then(model, expected, monkeypatch):
    counted, brought, count, bring = [], [], penalties.counted_logits, penalties.penalised_logits
    monkeypatch.setattr(sampler, "counted_logits", lambda *args: counted.append(1) or count(*args))
    monkeypatch.setattr(sampler, "penalised_logits", lambda *args: brought.append(1) or bring(*args))
    assert ByColumn(model, LateQueue(), 1).run(ahead=True) == expected
    assert counted and brought, "of one penalised row, and of two"


def test_a_step_that_fails_has_counted_nothing(model, expected, monkeypatch, capfd):
    """It is computed again without counts, and what it computes is missed by none of the steps behind it."""
    decoding, at = ByColumn(model, HostQueue(), 4), 0
    runner = decoding.compute._runner
    counts = runner.counts
    decoding.create()
    while not decoding.scheduler.is_empty:
        plan, at = decoding.scheduler.schedule(0.0), at + 1
        work = decoding.scheduler.apply(plan, decoding.cache.step(plan))
        how, runner.counts = decoding.rows(work), counts
        if at == 7:
            with monkeypatch.context() as patch:
                patch.setattr(penalties, "penalise_counted", lambda *_: torch.empty(0)[1])
                assert decoding.compute.launch(work, how).read() is None
            runner.counts = None
        launched = decoding.compute.launch(work, how)
        if runner.counts is not None and isinstance(how.sampled, PlainDraws) and how.sampled.penalised is not None:
            check_counts(counts, how.sampled.penalised)
        decoding.read(work, launched)
    assert at > 9, "there are steps behind it"
    assert decoding.outputs == expected
    assert "batch_failed" in "".join(capfd.readouterr())


def check_counts(counts, rows):
    """They are those of the histories, to the token that the step has computed."""
    vocab = np.arange(counts.tensor.shape[1])
    slots = counts._slot_of[rows.which]
    for slot, which, length, num_prompt in zip(slots, rows.which, rows.num_known, rows.num_prompts, strict=True):
        prompt, output = np.split(rows.tokens[which, :length], [num_prompt])
        found = ONE_MORE * np.bincount(output, minlength=len(vocab)) + IN_PROMPT * np.isin(vocab, prompt)
        assert counts.tensor[slot].tolist() == found.tolist()


def test_several_ranks_have_the_counts_of_the_first(model, expected):
    class ObedientRanks:
        def send_all(self, kind, body=b""):
            pass

        def hear(self):
            return []

    ranked = ByColumn(model, LateQueue(), 4, ObedientRanks())
    assert ranked.compute._runner.counts is not None
    assert ranked.run(ahead=True) == expected
