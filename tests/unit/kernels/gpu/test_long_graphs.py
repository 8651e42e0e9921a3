"""Captured decodes of long sequences, interpreted: work lists, merges, shared prefixes, and every kind of K and V.

The bounds from which sequences are cut and prefixes looked for are lowered, so that three blocks are long. A capture has no
lengths at all, so each replay is of other ones. A plain step of as many rows and with tables as wide gives the same bits.
"""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.graphs import graphed_steps
from kvkeeper.engine_service.compute.model_runner import ModelRunner, StepBounds, make_kv_layout
from kvkeeper.engine_service.compute.stored_model import stored_layout
from kvkeeper.engine_service.model.layer_groups import group_layers
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.values.batch import BatchRetention
from kvkeeper.kernels.quantised.formats import FORMATS
from kvkeeper.kernels.quantised.layout import QuantisedLayout, get_layer
from kvkeeper.kernels.scratch import Scratch
from tests.support.models.tiny_models import build_model_folder, tiny_model
from tests.support.slices import todays
from tests.support.stand_ins.recorded_graphs import RecordedGraphs
from tests.support.worlds.batches import ScheduledRow, build_batch
from tests.unit.kernels.gpu.captured import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    TABLES,
    TEXTS,
    WIDTH,
    all_claim_to_be_on_cuda,
    plain,
    ready_cold,
)
from tests.unit.kernels.gpu.pretend import on_cuda

__all__ = ["all_claim_to_be_on_cuda"]  # a fixture of the tests here
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp2"), pytest.mark.in_turn]
TILE = 16
_FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # for the interpreter's time


def kind(name, **overrides):
    """A tiny model with some things changed."""
    found = tiny_model(name)
    return dataclasses.replace(found, overrides=found.overrides | overrides)


QWEN3 = kind("qwen3", **_FEW_HEADS)
IN_TYPE = {  # windows and chunks longer than an item
    "gemma2": kind("gemma2", sliding_window=24, **_FEW_HEADS),
    "gpt_oss": kind("gpt_oss", sliding_window=24, **_FEW_HEADS),
    "llama4": kind("llama4", attention_chunk_size=32, num_hidden_layers=2, no_rope_layers=[1, 0], **_FEW_HEADS),
    "deepseek_v3": kind("deepseek_v3"),
}


@pytest.fixture(autouse=True)
def works(monkeypatch):
    """Every sequence of more than a tile is cut, and every step of three rows is looked through. The work lists, as planned."""
    decode_work = "kvkeeper.kernels.gpu.decode_work"
    monkeypatch.setattr(f"{decode_work}.num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(f"{decode_work}.FEWEST_ITEM_TOKENS", TILE)
    for module in ("decode_work", "paged_attention_decode", "latent_attention"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{module}.tile_tokens", lambda head_dim: TILE)
    for module in ("stored_tiles", "quantised_decode"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{module}.stored_tile_tokens", lambda head_dim: TILE)
    shared = "kvkeeper.kernels.gpu.shared_prefix"
    for name, lowered in {"_FEWEST_SEQS": 3, "FEWEST_SHARED_TOKENS": TILE, "FEWEST_MEMBERS": 2, "MEMBERS": 2}.items():
        monkeypatch.setattr(f"{shared}.{name}", lowered)
    for module in ("paged_attention_decode", "quantised_decode", "quantised_shared"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{module}.MEMBERS", 2)
    from kvkeeper.kernels.gpu import decode_work as planning

    plan_work, planned = planning.plan_work, []

    def plan(*args, **options):
        planned.append(plan_work(*args, **options))
        return planned[-1]

    for module in ("decode_work", "quantised_decode"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{module}.plan_work", plan)
    return planned


def filled(layout, num_groups):
    """An arena for all contexts, of drawn K and V; of stored ones the blocks of further groups are pages of the tail."""
    drawn = torch.Generator().manual_seed(2)
    view = layout.view(torch.zeros(num_groups * NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8))
    if not isinstance(layout, QuantisedLayout):
        view[1:] = torch.randn(view[1:].shape, generator=drawn)
        return view
    for layer in (get_layer(view, layout, layer) for layer in range(layout.num_layers)):
        elements = torch.randint(0, 256, layer.elements[1:NUM_BLOCKS].shape, generator=drawn, dtype=torch.uint8)
        layer.elements[1:NUM_BLOCKS] = elements & 0x77  # no 8-bit float that is not finite
        largest = torch.rand(layer.scales[1:NUM_BLOCKS].shape, generator=drawn) / layout.kv_format.most
        layer.scales[1:NUM_BLOCKS] = largest.to(torch.bfloat16).view(torch.int16)
        if layer.tail is not None:
            layer.tail[NUM_BLOCKS:] = torch.randn(layer.tail[NUM_BLOCKS:].shape, generator=drawn)
    return view


@dataclasses.dataclass
class Pair:
    """A runner that has captured and one that has not, on arenas with the same bytes; steps change both of them alike."""

    captured: ModelRunner
    without: ModelRunner
    views: tuple[torch.Tensor, torch.Tensor]
    graphs: RecordedGraphs
    num_groups: int
    num_tail_blocks: int = WIDTH  # of a sequence, that have pages in the further groups

    @classmethod
    def of(
        cls,
        model,
        layout,
        groups=(),
        *,
        graphs=None,
        num_tail_blocks=WIDTH,
        most_rows=2,
        most_tokens=WIDTH * BLOCK_SIZE,
        prompt_tokens=0,
    ):
        view = filled(layout, max(len(groups), 1))
        other, graphs = view.clone(), graphs or RecordedGraphs()
        captured, without = (ModelRunner(model, on_cuda(each)[0], layout, groups) for each in (view, other))
        ready_cold(captured, graphs, bounds=StepBounds(most_rows, most_tokens, most_step_tokens=prompt_tokens))
        assert captured.graphed is not None
        return cls(captured, without, (view, other), graphs, max(len(groups), 1), num_tail_blocks)

    def batch(self, rows):
        """A step of (length, table) each: a token as the last of so many, the table's number or blocks. Or it says how many."""
        chosen = []
        for seq, (length, table, *several) in enumerate(rows):
            blocks, count = TABLES[table] if isinstance(table, int) else table, several[0] if several else 1
            chosen.append(ScheduledRow(TEXTS[seq][:count], length - count, blocks))
        batch = build_batch(chosen, BLOCK_SIZE)
        if self.num_groups == 1:
            return batch
        shifts = np.arange(1, self.num_groups) * NUM_BLOCKS
        first = np.maximum(-(-batch.seq_lens // BLOCK_SIZE) - self.num_tail_blocks, 0)
        is_there = (batch.block_tables > 0) & (np.arange(batch.block_tables.shape[1]) >= first[:, None])
        tables = np.where(is_there[:, None], batch.block_tables[:, None] + shifts[:, None], 0).astype(np.int32)
        return dataclasses.replace(batch, group_tables=tables, group_slots=batch.slot_mapping + shifts[:, None] * BLOCK_SIZE)

    def step(self, rows, *, is_same_shape):
        """Compute a step both ways, and compare what it gives."""
        batch, before = self.batch(rows), self.captured.graphed.num_replays
        found, expected = plain(self.captured.forward(batch)), plain(self.without.forward(batch))
        assert self.captured.graphed.num_replays == before + 1
        assert torch.isfinite(found).all()
        tolerance = 0 if is_same_shape else 1e-5
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(*(view[1:] for view in self.views), rtol=0, atol=tolerance)
        assert not self.views[0][0].any(), "padding wrote to the null block"


@pytest.fixture
def model(tmp_path):
    return load_model(build_model_folder(tmp_path, QWEN3), progress=False)[0]


def work_of(planned, num_seqs, num_groups=1):
    """The first work list of the captured step of so many rows, of num_groups that a step has.

    A step without a graph was planned before it, and others behind it.
    """
    return [work for work in planned if work is not None and len(work.runs) == num_seqs][num_groups]


def num_items(work, num_seqs):
    return work.runs.as_subclass(torch.Tensor)[:num_seqs, 1].tolist()


def sharing(table, other, num_blocks):
    """The blocks of `other`, but for its first, which are those of `table`."""
    return np.concatenate((TABLES[table][:num_blocks], TABLES[other][num_blocks:]))


@pytest.fixture
def pair(model, works):
    return Pair.of(model, make_kv_layout(model.config, model.dtype, BLOCK_SIZE), most_rows=4)


def test_sequences_are_cut_and_merged_by_the_lengths_of_each_replay(pair, works):
    lengths = {1: [[48], [3]], 2: [[33, 48], [16, 40]], 4: [[48, 5, 33, 16]]}
    for size, replays in lengths.items():
        cut = []
        for replay in replays:
            width = max(replay) > 2 * BLOCK_SIZE  # else plain tables are narrower, and more is in one item
            pair.step([(length, table) for table, length in enumerate(replay)], is_same_shape=width)
            cut.append(num_items(work_of(works, size), size))
        assert cut == [[-(-length // TILE) for length in replay] for replay in replays]
    pair.step([(48, 0), (40, 3), (9, 5)], is_same_shape=False)  # padded
    assert num_items(work_of(works, 4), 4) == [3, 3, 1, 1]
    kernels = [set(graph.kernels) for graph in pair.graphs.graphs[:3]]  # of decodes, which come first
    assert all({"plan_kernel", "decode_kernel", "merge_items_kernel"} <= each for each in kernels)
    assert ["shared_kernel" in each for each in kernels] == [True, False, False]


def test_what_sequences_share_is_found_anew_in_each_replay(pair, works):
    strangers = [(length, table) for table, length in enumerate((48, 20, 33, 47))]
    one, two = sharing(0, 1, 2), sharing(0, 2, 2)
    replays = {
        "nothing": (strangers, [0, 0, 0, 0]),
        "three of four, by the shortest": ([(40, 0), (48, sharing(0, 1, 1)), (18, 3), (35, two)], [1, 1, 0, 1]),
        "two and two": ([(48, 3), (41, 0), (34, sharing(3, 5, 2)), (46, one)], [2, 2, 2, 2]),
    }
    for rows, num_shared in replays.values():
        pair.step(rows, is_same_shape=True)
        members = work_of(works, 4).shared.members.as_subclass(torch.Tensor)
        assert members[:, 0].tolist() == num_shared
    pair.step([(40, one), (48, 0), (37, two)], is_same_shape=False)  # padded
    assert members[:, 0].tolist() == [2, 2, 2, 0]


def test_scratch_stays_where_it_is_once_the_first_size_is_captured(model, monkeypatch):
    """A graph holds its address. It grows before, while all is computed once without a graph."""
    taken, of_runs = [], []

    class Watched(Scratch):
        def take(self, num_elements, dtype):
            found = super().take(num_elements, dtype)
            taken.append(found.untyped_storage().data_ptr())
            return found

    class Watching(RecordedGraphs):
        def capture(self, run):
            def watched():
                taken.clear()
                made = run()
                of_runs.append(set(taken))
                return made

            return super().capture(watched)

    monkeypatch.setattr(graphed_steps, "Scratch", Watched)
    Pair.of(model, make_kv_layout(model.config, model.dtype, BLOCK_SIZE), graphs=Watching())
    decodes = [each for each in of_runs if each]
    assert len(decodes) == 2 * 2, "each of two sizes runs twice"
    assert len(set().union(*decodes[1:])) == 1


def test_what_graphs_read_is_kept_as_long_as_they_are_and_no_longer(model, monkeypatch):
    """A graph keeps no memory that was there before it. What is freed is another tensor's soon, or nobody's."""
    memory, make = [], Scratch.take

    def take(self, num_elements, dtype):
        found = make(self, num_elements, dtype)
        memory.append(weakref.ref(self))
        return found

    monkeypatch.setattr(Scratch, "take", take)
    pair = Pair.of(model, make_kv_layout(model.config, model.dtype, BLOCK_SIZE))
    gc.collect()
    assert memory, "steps are cut, and merged from scratch"
    assert all(scratch() is not None for scratch in memory)
    pair.step([(48, 0), (40, 3)], is_same_shape=True)
    own, pair.captured.graphed = memory[0], None
    gc.collect()
    assert own() is None, "the recorder keeps nothing, as a device"


def test_positions_beyond_the_first_rotary_table_are_replayed_also_once_a_sequence_went_farther(model, monkeypatch):
    monkeypatch.setattr("kvkeeper.kernels.gpu.decode_work.FEWEST_ITEM_TOKENS", 256)  # few items, of few tiles each
    for module in ("decode_work", "paged_attention_decode"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{module}.tile_tokens", lambda head_dim: 64)
    layout, most = make_kv_layout(model.config, model.dtype, BLOCK_SIZE), 1100
    assert model.reserve_positions(0) == 1024 < most
    pair = Pair.of(model, layout, most_rows=1, most_tokens=most)
    many = np.resize(np.arange(1, NUM_BLOCKS, dtype=np.int32), 100)  # read again and again, and written at the end
    pair.step([(most, many)], is_same_shape=True)
    pair.step([(20, 0)], is_same_shape=False)
    farther = pair.batch([(1500, many)])
    farther = dataclasses.replace(farther, retention=BatchRetention(np.array([4], np.int32), np.array([30], np.int32)))
    torch.testing.assert_close(*(plain(runner.forward(farther)) for runner in (pair.captured, pair.without)), rtol=0, atol=0)
    assert pair.captured.graphed.num_replays == 2, "a step with sink and window is computed without a graph"
    pair.step([(most - 1, many)], is_same_shape=True)


REPLAYS = [[(48, 0)], [(7, 1)], [(33, 2), (48, 0)], [(40, sharing(0, 1, 2)), (12, 3)], [(48, 4)]]
PROMPTS = [
    [(48, 0, 6)],
    [(40, 1), (30, 2, 5)],
    [(5, 3, 5), (48, 4, 3)],
]  # the last ones of these lengths, apart and beside a decode


@pytest.mark.parametrize("name", todays([*IN_TYPE], 1))
def test_other_kinds_of_models_are_replayed_at_other_lengths(name, tmp_path):
    """By groups of their layers, as they are served."""
    model, _ = load_model(build_model_folder(tmp_path, IN_TYPE[name]), progress=False)
    groups = group_layers(model.config.windows, model.config.chunks)
    prompts = [] if any(model.config.chunks) else PROMPTS
    layout = make_kv_layout(model.config, model.dtype, BLOCK_SIZE, groups)
    pair = Pair.of(model, layout, groups, prompt_tokens=8 if prompts else 0)
    for rows in REPLAYS:
        pair.step(rows, is_same_shape=max(length for length, _ in rows) > 2 * BLOCK_SIZE)
    for rows in prompts:
        pair.step(rows, is_same_shape=False)
    assert pair.captured.graphed.num_with_prompts == len(prompts)
    own = "latent_attention_kernel" if model.config.is_latent else "decode_kernel"
    decodes = [set(graph.kernels) for graph in pair.graphs.graphs if "plan_kernel" in graph.kernels]
    assert len(decodes) == 2 + bool(prompts)
    assert all({own, "merge_items_kernel"} <= each for each in decodes)


@pytest.mark.parametrize(("name", "num_tail_blocks"), todays([("int8", 1), ("int4", 0), ("fp8", 1)], 1))
def test_stored_keys_and_values_are_replayed_at_other_lengths(name, num_tail_blocks, model, works, monkeypatch):
    monkeypatch.setattr("kvkeeper.kernels.gpu.shared_prefix._FEWEST_SEQS", 2)
    layout, groups = stored_layout(model, FORMATS[name], BLOCK_SIZE, num_tail_blocks * BLOCK_SIZE)
    pair = Pair.of(model, layout, groups, num_tail_blocks=num_tail_blocks)
    for rows in [*REPLAYS, [(40, sharing(0, 1, 2)), (48, 0)]]:
        pair.step(rows, is_same_shape=max(length for length, _ in rows) > 2 * BLOCK_SIZE)
    num_tails = max(pair.num_groups - 1, 1)
    assert work_of(works, 2, num_tails).shared.members.as_subclass(torch.Tensor)[:, 0].tolist() == [2, 2]
    assert "quantised_shared_kernel" in pair.graphs.graphs[0].kernels
    decodes = [graph for graph in pair.graphs.graphs if "plan_kernel" in graph.kernels]
    used = {"quantised_decode_kernel", "store_quantised_kernel", "plan_kernel", "merge_items_kernel"}
    assert all(used <= set(graph.kernels) for graph in decodes)


@pytest.mark.parametrize(("name", "num_tail_blocks"), todays([("int8", 1), ("int4", 0), ("fp8", 1)], 1))
def test_prompts_are_replayed_over_stored_keys_and_values(name, num_tail_blocks, model):
    layout, groups = stored_layout(model, FORMATS[name], BLOCK_SIZE, num_tail_blocks * BLOCK_SIZE)
    pair = Pair.of(model, layout, groups, num_tail_blocks=num_tail_blocks, prompt_tokens=8)
    for rows in PROMPTS:
        pair.step(rows, is_same_shape=False)
    assert pair.captured.graphed.num_with_prompts == len(PROMPTS)
