"""Steps on a device that is behind the host: launched before those before them are read, and read late.

The model is a real one; the device does nothing until the host waits for it (LateQueue).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from kvkeeper.engine_service.compute.device.device_queue import HostQueue
from kvkeeper.engine_service.compute.device.upload import PackedUpload, Stage, Staged
from kvkeeper.engine_service.compute.graphs.step_inputs import InputsShape, StepInputs
from kvkeeper.engine_service.compute.graphs.step_sizes import StepSize
from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.compute.step_compute import Launched, StepCompute, StepRows
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.ranks.messages import Kind, decode_batch
from kvkeeper.engine_service.ranks.ranked_runner import RankedRunner
from kvkeeper.engine_service.scheduler.limits import Limits
from kvkeeper.engine_service.scheduler.scheduler import Scheduler
from kvkeeper.engine_service.values.errors import DeviceLost
from kvkeeper.engine_service.values.request import Request
from kvkeeper.engine_service.values.sampling_params import LIKELIEST, SamplingParams, SamplingRow
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model
from tests.support.stand_ins.device_faults import accelerator_error
from tests.support.stand_ins.late_queue import LateQueue
from tests.support.worlds.batches import ScheduledRow, build_batch
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.obeying_ranks import ObeyingRanks

BLOCK_SIZE, NUM_BLOCKS, NUM_NEW = 4, 40, 9
SHAPED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.2)
PLAIN = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_model_folder(tmp_path_factory.mktemp("model"), tiny_model("qwen3"))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, progress=False)[0]


def make_runner(model, queue=None):
    layout = make_kv_layout(model.config, model.dtype, BLOCK_SIZE)
    view = layout.view(torch.zeros(NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8))
    return ModelRunner(model, view, layout, queue=queue)


class Decoding:
    """Three sequences on the real core, decoded to their ends."""

    def __init__(self, model, queue, ranks=None, *, chunk_size=64):
        limits = Limits(BLOCK_SIZE, 64, 8, 8, 64, chunk_size, 64, 8, num_usable_blocks=NUM_BLOCKS - 1)
        self.scheduler, self.cache, self.queue = Scheduler(limits), CoreCache(NUM_BLOCKS, BLOCK_SIZE, 8), queue
        runner = make_runner(model, queue)
        self.compute = StepCompute(runner if ranks is None else RankedRunner(runner, ranks))
        self.outputs: dict[str, list[tuple[int, float]]] = {}
        for at, length in enumerate((3, 6, 9)):
            prompt = np.array(random_tokens(length, at), np.int32)
            self.scheduler.add(Request(f"r{at}", prompt, NUM_NEW - at), 0.0)
            self.outputs[f"r{at}"] = []
        self.num_ahead = 0

    def create(self):
        while (sequence := self.scheduler.next_to_create()) is not None:
            self.cache.create(sequence.sequence_id, sequence.token_ids.tolist(), sequence.request.max_len)
            self.scheduler.waiting.created(sequence)

    def rows(self, work):
        """The first sequence is plain; the others have penalties and log probabilities, each its own seed."""
        found = []
        for sequence, history, row, is_awaited in zip(
            work.sampled, self.scheduler.histories(work), work.sample_rows.tolist(), work.awaited.tolist(), strict=True
        ):
            if sequence.request.request_id == "r0":
                found.append(SamplingRow(PLAIN, 0, 0, history, 0, 1, awaited_row=row if is_awaited else None))
                continue
            prompt_len, seed = len(sequence.request.prompt), sequence.request.arrival
            found.append(SamplingRow(SHAPED, seed, 0, history, prompt_len, 2, awaited_row=row if is_awaited else None))
        return StepRows(found, [])

    def run(self, *, ahead):
        before = None
        while not self.scheduler.is_empty:
            self.create()
            plan = self.scheduler.schedule(0.0)
            self.cache.has_step_in_flight = before is not None
            answer = self.cache.step(plan)
            is_ahead = ahead and before is not None and self.scheduler.find_wait(plan, answer) is None
            if before is not None and not is_ahead:
                self.read(*before)
            work = self.scheduler.apply(plan, answer)
            flight = work, self.compute.launch(work, self.rows(work))
            if is_ahead:
                self.read(*before)
                self.num_ahead += work.batch is not None
            before = flight
        return self.outputs

    def read(self, work, launched: Launched):
        computed = launched.read()
        assert computed is not None
        taken = self.scheduler.advance(work, computed.sampled.token_ids.astype(np.int32))
        for row, (sequence, token_ids) in enumerate(zip(work.sampled, taken, strict=True)):
            output = self.outputs[sequence.request.request_id]
            output += [(token_id, round(computed.logprobs[row].logprob, 4)) for token_id in token_ids.tolist()]
            if len(output) == sequence.request.max_new_tokens:
                self.scheduler.end_sequence(sequence)


def test_what_is_read_late_is_what_would_have_been_read_at_once(model):
    expected = Decoding(model, HostQueue()).run(ahead=False)
    assert sorted(map(len, expected.values())) == [NUM_NEW - 2, NUM_NEW - 1, NUM_NEW]
    late = Decoding(model, LateQueue())
    assert late.run(ahead=True) == expected
    assert late.num_ahead >= NUM_NEW - 2
    assert late.queue.most_waiting == 2, "one step runs ahead of one that was not read"
    on_host = Decoding(model, HostQueue())
    assert on_host.run(ahead=True) == expected
    assert on_host.num_ahead == late.num_ahead


class ObedientRanks:
    """Other ranks that do as they are told; each call comes from the thread that launches."""

    def send_all(self, kind, body=b""):
        pass

    def hear(self):
        return []


def test_the_first_of_several_ranks_reads_its_steps_in_the_order_of_its_device(model):
    """What the sampler drew is on the first rank's device, and comes to the host as the results of one rank do."""
    expected = Decoding(model, HostQueue()).run(ahead=False)
    ranked = Decoding(model, LateQueue(), ObedientRanks())
    assert ranked.run(ahead=True) == expected
    assert ranked.queue.num_begun > NUM_NEW
    assert not ranked.compute.is_immediate, "another thread reads them"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_steps_of_several_ranks_run_ahead_as_those_of_one(model, folder, num_ranks):
    """No host brings the tokens of the step before to a rank, and none waits more often than that of one rank alone."""
    alone = Decoding(model, LateQueue())
    expected = alone.run(ahead=True)
    with ObeyingRanks(num_ranks, lambda split: make_runner(load_model(folder, progress=False, split=split)[0])) as ranks:
        ranked = Decoding(load_model(folder, progress=False, split=ranks.first)[0], LateQueue(), ranks)
        found = ranked.run(ahead=True)
    for request, drawn in expected.items():
        assert [token_id for token_id, _ in found[request]] == [token_id for token_id, _ in drawn]
        assert [logprob for _, logprob in found[request]] == pytest.approx([logprob for _, logprob in drawn], abs=1e-3)
    assert ranked.num_ahead == alone.num_ahead >= NUM_NEW - 2
    assert (ranked.queue.most_waiting, ranked.queue.num_blocked) == (2, alone.queue.num_blocked)
    batches = [decode_batch(bytearray(body)) for kind, body in ranks.messages if kind == Kind.FORWARD]
    awaiting = [batch for batch in batches if batch.awaited_rows is not None]
    assert len(awaiting) == ranked.num_ahead
    for batch in awaiting:
        assert (batch.awaited_rows >= 0).any()
        assert not batch.token_ids[batch.awaited_rows >= 0].any(), "the host does not know them"
    assert {kind for kind, _ in ranks.messages} == {Kind.FORWARD}, "nothing else is asked or waited for"
    assert [each.num_shared for each in ranks.together] == [len(awaiting)] * num_ranks


def test_a_step_that_is_read_before_the_device_has_done_it_is_caught(model, capfd):
    class Hasty(LateQueue):
        def mark(self):
            return HostQueue().mark()

    with pytest.raises(AssertionError):
        Decoding(model, Hasty()).run(ahead=False)
    assert "the device has not got that far" in "".join(capfd.readouterr())


def test_memory_that_the_device_has_not_copied_is_not_written_over():
    queue, arrays = LateQueue(), [{"x": np.full(4, value)} for value in range(5)]
    upload, found = PackedUpload(torch.device("cpu"), queue, pin_memory=False), []
    for at, each in enumerate(arrays):
        copy = upload.stage(each)
        queue.submit(lambda copy=copy: found.append(copy()["x"].tolist()))
        if at:
            queue.run_up_to(at)  # the step before is read
    queue.run_up_to(5)
    assert found == [[value] * 4 for value in range(5)]


def test_memory_is_filled_again_only_once_the_device_has_copied_it():
    queue, stage, done = LateQueue(), Stage(8, pin_memory=False), []
    stage.reuse()
    queue.submit(lambda: done.append("copied"))
    stage.note_copied(queue.mark())
    assert not done
    stage.reuse()
    assert done == ["copied"]


def test_a_third_step_under_way_is_refused():
    stages = [Stage(8, pin_memory=False) for _ in range(2)]
    for stage in stages:
        stage.reuse()
    with pytest.raises(AssertionError, match="two steps"):
        stages[0].reuse()


def test_a_failure_on_the_device_ends_its_step_alone(model, capfd):
    decoding = Decoding(model, LateQueue())
    decoding.create()
    runner = decoding.compute._runner
    forward = runner.stage
    plan = decoding.scheduler.schedule(0.0)
    work = decoding.scheduler.apply(plan, decoding.cache.step(plan))

    def broken(*_):
        def compute():
            raise RuntimeError("device-side assert")

        return Staged(compute)

    runner.stage = broken
    failed = decoding.compute.launch(work, StepRows([LIKELIEST] * 3, []))
    runner.stage = forward
    following = decoding.compute.launch(work, StepRows([LIKELIEST] * 3, []))
    assert failed.read() is None
    assert following.read() is not None
    assert "device-side assert" in "".join(capfd.readouterr())


def test_steps_that_fail_before_their_inputs_are_copied_leave_room_for_those_behind(model, monkeypatch, capfd):
    decoding = Decoding(model, LateQueue())
    decoding.create()
    runner = decoding.compute._runner
    plan = decoding.scheduler.schedule(0.0)
    work, how = decoding.scheduler.apply(plan, decoding.cache.step(plan)), StepRows([LIKELIEST] * 3, [])
    copying = replace(work, copies=[(NUM_BLOCKS - 2, NUM_BLOCKS - 1)])

    def raises(*args):
        raise RuntimeError("out of memory")

    for owner, name in (
        (runner, "copy_blocks"),  # before the upload
        (runner, "_plain"),  # the upload itself
        (decoding.queue, "submit"),  # nothing is run
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, raises)
            failed = [decoding.compute.launch(copying, how) for _ in range(2)]
            assert [step.read() for step in failed] == [None, None]
    assert "".join(capfd.readouterr()).count("RuntimeError: out of memory") == 6
    assert decoding.compute.launch(work, how).read() is not None


def a_packed_step():
    upload = PackedUpload(torch.device("cpu"), LateQueue(), pin_memory=False)
    return lambda: upload.stage({"x": np.zeros(4)})


def a_captured_step():
    shape = InputsShape(tokens=1, logits=1, decodes=1, prompts=0, groups=1, table_width=1, prompt_width=1)
    inputs = StepInputs(shape, torch.device("cpu"), LateQueue(), padding_row=1, padding_slot=1, pin_memory=False)
    batch = build_batch([ScheduledRow([5], 0, np.array([1], np.int32))], BLOCK_SIZE)
    return lambda: inputs.stage(batch, 1, StepSize(1, 0, 0, 1))


@pytest.mark.parametrize("step", [a_packed_step, a_captured_step])
def test_a_copy_that_fails_and_one_that_is_given_back_keep_no_memory(step, monkeypatch):
    stage = step()

    def raises(*args, **options):
        raise RuntimeError("out of memory")

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "to", raises)
            patched.setattr(torch.Tensor, "copy_", raises)
            with pytest.raises(RuntimeError, match="out of memory"):
                stage()()
    for _ in range(2):
        stage().give_back()
    stage()()


def test_a_device_that_is_lost_behind_the_host_is_told_by_whoever_waits(model):
    class Lost(LateQueue):
        num_waits = 0

        def wait(self, count, num_copies):
            self.num_waits += 1
            if self.num_waits > 5:
                raise accelerator_error(700)
            super().wait(count, num_copies)

    decoding = Decoding(model, Lost())
    with capture_logs() as logs, pytest.raises(DeviceLost) as lost:
        decoding.run(ahead=True)
    assert lost.value.fault.startswith("cudaErrorIllegalAddress: ")
    assert decoding.num_ahead
    assert not logs, "the loop tells it"


def test_nothing_is_launched_behind_a_launch_that_lost_the_device(model):
    decoding = Decoding(model, LateQueue())
    decoding.create()
    plan = decoding.scheduler.schedule(0.0)
    work, num_staged = decoding.scheduler.apply(plan, decoding.cache.step(plan)), 0

    def broken(*_):
        nonlocal num_staged
        num_staged += 1
        raise accelerator_error(719, "unspecified launch failure")

    decoding.compute._runner.stage = broken
    launched = decoding.compute.launch(work, StepRows([LIKELIEST] * 3, []))
    with pytest.raises(DeviceLost, match="the engine has lost its device") as following:
        decoding.compute.launch(work, StepRows([LIKELIEST] * 3, []))
    with pytest.raises(DeviceLost) as first:
        launched.read()
    assert first.value is following.value
    assert num_staged == 1
