"""The recorder of captures itself: what it refuses, and that a replay is one of the capture's memory."""

import pytest
import torch

from tests.support.stand_ins.recorded_graphs import FreedMemory, HostRead, RecordedGraphs

READS = {
    "float": lambda x: float(x.sum()),
    "tolist": lambda x: x.tolist()[0],
    "numpy": lambda x: x.numpy()[0],
    "nonzero": lambda x: len(x.nonzero()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_recorder_refuses_a_capture_that_waits_for_the_device(read):
    x = torch.ones(3)
    with pytest.raises(HostRead):
        RecordedGraphs().capture(lambda: x * read(x))


def test_the_recorder_replays_on_the_memory_of_the_capture():
    x = torch.zeros(4)
    graph, made = RecordedGraphs().capture(lambda: (x[1:] + 1).mul_(2).sum())
    x.copy_(torch.tensor([9.0, 1.0, 2.0, 3.0]))
    graph.replay()
    assert made.item() == 18


@pytest.mark.parametrize("copy", [lambda x: x.contiguous(), lambda x: x.reshape(-1)], ids=["contiguous", "reshape"])
def test_the_recorder_replays_copies_that_might_have_been_views(copy):
    x = torch.zeros(4)
    with torch.inference_mode():
        graph, made = RecordedGraphs().capture(lambda: copy(x.view(2, 2).T))
        x.copy_(torch.tensor([9.0, 1.0, 2.0, 3.0]))
        graph.replay()
    assert made.flatten().tolist() == [9, 2, 1, 3]


def test_a_replay_finds_nothing_in_the_memory_of_its_capture():
    """What was computed before the capture, or by it, is not there for a replay that leaves it out."""
    x, known = torch.zeros(3), []

    def run():
        made = x.new_empty(3) if known else x + 1
        known.append(made)
        return made

    graph, made = RecordedGraphs().capture(run)
    made.fill_(1)
    graph.replay()
    assert made.isnan().all()


@pytest.mark.parametrize("is_written", [False, True], ids=["read", "written"])
def test_a_replay_on_memory_that_was_freed_is_refused(is_written):
    """A graph on a device has its address, and keeps it from nothing."""
    kept, freed = torch.ones(3), [torch.ones(3)]

    def run():
        return freed[0].add_(kept) if is_written else kept + freed[0]

    graph, made = RecordedGraphs().capture(run)
    del made
    graph.replay()
    freed.clear()
    with pytest.raises(FreedMemory, match=r"float32 \[3\]"):
        graph.replay()


def test_what_a_capture_made_stays_as_long_as_its_graph():
    """On a device it is of the pool that graphs share."""
    x, between = torch.zeros(3), []

    def run():
        between.append((x + 1).neg_())
        return x.new_zeros(3).copy_(between[-1])

    graph, made = RecordedGraphs().capture(run)
    between.clear()
    x.fill_(4)
    graph.replay()
    assert made.tolist() == [-5, -5, -5]
