"""TokenCounts: the counts that a step finds are those of each history, whatever steps came between."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.device.token_counts import Counted, TokenCounts
from kvkeeper.engine_service.values.sampling_params import NOTHING_AWAITED, PenalisedRows
from kvkeeper.kernels.penalise_counted import IN_PROMPT, ONE_MORE

VOCAB, NUM_ROWS, MOST = 7, 6, 40


class World:
    """Sequences in rows of a table, whose tokens grow, and the counts of some of them."""

    def __init__(self, num_slots: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.counts = TokenCounts(num_slots, VOCAB, MOST, torch.device("cpu"))
        self.tokens = self.random.integers(0, VOCAB, (NUM_ROWS, MOST)).astype(np.int32)
        self.serials = np.arange(1, NUM_ROWS + 1)
        self.prompts = self.random.integers(1, 6, NUM_ROWS)
        self.lens = self.prompts.copy()

    def come(self, row: int) -> None:
        """Another sequence in this row."""
        self.serials[row] = self.serials.max() + 1
        self.tokens[row] = self.random.integers(0, VOCAB, MOST)
        self.prompts[row] = self.lens[row] = self.random.integers(1, 6)

    def rows(self, which: list[int], awaited: bool) -> PenalisedRows:
        """awaited: the last token of each is not on the host yet, where it is of the output."""
        at, lens = np.array(which), self.lens[which]
        is_awaited = awaited & (lens > self.prompts[which])
        return PenalisedRows(
            where=np.arange(len(at)),
            penalties=np.ones((3, len(at)), np.float32),
            tokens=self.tokens,
            which=at,
            num_known=lens - is_awaited,
            num_prompts=self.prompts[which],
            awaited=np.where(is_awaited, at, NOTHING_AWAITED),
            serials=self.serials[which],
        )

    def run(self, which: list[int], counted: Counted) -> None:
        """As a captured step does: it counts the token that it computes, then it finds these counts."""
        counted.bring()
        newest = self.tokens[which, self.lens[which] - 1]
        cells = torch.from_numpy(counted.rows.slots * VOCAB + newest)
        self.counts.tensor.view(-1).index_add_(0, cells, torch.from_numpy(counted.rows.addends).to(torch.int16))
        for row, slot in zip(which, counted.rows.slots.tolist(), strict=True):
            prompt, output = np.split(self.tokens[row, : self.lens[row]], [self.prompts[row]])
            expected = ONE_MORE * np.bincount(output, minlength=VOCAB) + IN_PROMPT * np.isin(np.arange(VOCAB), prompt)
            assert self.counts.tensor[slot].tolist() == expected.tolist(), (row, slot)

    def step(self, which: list[int], *, awaited: bool = True) -> Counted:
        counted = self.counts.stage(self.rows(which, awaited))
        assert counted is not None
        self.run(which, counted)
        return counted


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_those_of_the_histories_whatever_comes_between(seed: int) -> None:
    world = World(num_slots=4, seed=seed)
    for _ in range(150):
        random = world.random
        which = random.permutation(NUM_ROWS)[: random.integers(1, 5)].tolist()
        world.step(which, awaited=bool(random.integers(2)))
        if random.integers(8):  # else the step comes again
            world.lens[which] = np.minimum(world.lens[which] + 1, MOST)
        for row in random.permutation(NUM_ROWS)[: random.integers(0, 3)].tolist():
            if random.integers(2) or world.lens[row] >= MOST - 3:
                world.come(row)
            else:
                world.lens[row] += random.integers(0, 3)  # drawn by steps that were not captured
        assert not world.counts.tensor[world.counts.padding_slot].any()


def test_a_sequence_that_goes_on_brings_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world, brought = World(num_slots=4), []
    own = TokenCounts._bring
    monkeypatch.setattr(TokenCounts, "_bring", lambda counts, rows, ends: brought.append(len(rows)) or own(counts, rows, ends))
    for _ in range(5):
        world.step([1, 3])
        world.lens[[1, 3]] += 1
    assert brought == [2]
    world.step([3, 5])
    assert brought == [2, 2]


def test_a_step_that_is_given_back_has_counted_nothing() -> None:
    world = World(num_slots=4)
    world.step([0, 1])
    world.lens[[0, 1]] += 1
    lost = world.counts.stage(world.rows([0, 1], awaited=True))
    assert lost is not None
    lost.forget()
    world.lens[[0, 1]] += 1  # by a step that was not captured
    world.step([1, 0])


def test_more_rows_than_slots_and_rows_of_nobody_are_not_counted() -> None:
    world = World(num_slots=2)
    assert world.counts.stage(world.rows([0, 1, 2], awaited=True)) is None
    assert world.counts.stage(replace(world.rows([0, 1], awaited=True), serials=None)) is None
    world.step([0, 1])


def test_memory_bounds_the_slots_and_long_sequences_have_wider_cells() -> None:
    device = torch.device("meta")
    assert TokenCounts(300, 131_072, 8192, device).tensor.shape == (301, 131_072)
    assert TokenCounts(1000, 131_072, 8192, device).num_slots == 512
    wide = TokenCounts(1000, 131_072, 1 << 17, device)
    assert (wide.num_slots, wide.tensor.dtype) == (256, torch.int32)
