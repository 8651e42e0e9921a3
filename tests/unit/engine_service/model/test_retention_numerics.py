"""Teacher-forced logits with sink and window against attention with positions within the cache.

The reference keeps keys before rotation and numbers what is left anew at every token
(tests/support/reference/within_cache.py). Blocks that retention gives back are NaN from then on, and their table entries
name the null block, which is NaN as well.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.model.decoder import Decoder
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.rope_config import RopeConfig
from kvkeeper.engine_service.model.rotary_table import RotaryTable
from kvkeeper.engine_service.values.batch import BatchRetention
from kvkeeper.kernels.activations.rotary import rotary
from tests.support.models.tiny_models import TINY_MODELS, build_model_folder, random_tokens
from tests.support.reference.within_cache import load_network, within_cache_logits
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("kernel_path")

BOUND = 1e-4
# Sinks that end in, before and behind a block's end; windows smaller than a block, and larger.
KEPT = [(0, 5), (1, 2), (4, 8), (5, 11), (16, 3), (6, 17), (0, 0)]
FAMILIES = [model for model in TINY_MODELS if model.name in ("llama_llama3_rope", "mistral", "qwen2", "qwen3", "gemma")]


def length_of(sink: int, window: int) -> int:
    """Four windows of tokens behind the sinks, and at least a block or two."""
    return max(sink + 4 * window + 1, 40)


@dataclasses.dataclass(frozen=True)
class World:
    model: Decoder
    texts: list[tuple[int, ...]]
    expected: list[torch.Tensor]
    whole: torch.Tensor  # transformers' own logits of the last text, which is kept whole


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda model: model.name)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder: Path = build_model_folder(tmp_path_factory.mktemp("model"), request.param)
    network = load_network(folder)
    texts = [random_tokens(length_of(*kept), seed=place) for place, kept in enumerate(KEPT)]
    expected = [
        within_cache_logits(network, text, sink, window or len(text)) for text, (sink, window) in zip(texts, KEPT, strict=True)
    ]
    with torch.no_grad():
        whole = network(torch.tensor([texts[-1]]), use_cache=False).logits[0]
    return World(load_model(folder, progress=False)[0], texts, expected, whole)


class Tables:
    """A runner on a plain tensor of NaN, and tables that lose blocks as the cache service takes them back."""

    def __init__(self, model: Decoder, block_size: int) -> None:
        self.block_size, num_blocks = block_size, 150
        layout = make_kv_layout(model.config, model.dtype, block_size)
        self.view = layout.view(torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8)).fill_(float("nan"))
        self.runner = ModelRunner(model, self.view, layout)
        self.free = (np.random.default_rng(0).permutation(num_blocks - 1) + 1).tolist()
        self.tables: list[list[int]] = []
        self.most_held = 0

    def grow(self, seq: int, num_tokens: int) -> None:
        while len(self.tables[seq]) * self.block_size < num_tokens:
            self.tables[seq].append(self.free.pop(0))
        self.most_held = max(self.most_held, sum(block > 0 for block in self.tables[seq]))

    def give_back(self, seq: int, num_committed: int, sink: int, window: int) -> None:
        """Blocks without a token of sink or window; all of them without a window of at least 1."""
        for idx in range(-(-sink // self.block_size), (num_committed - window) // self.block_size):
            if block := self.tables[seq][idx]:
                self.view[block] = float("nan")
                self.tables[seq][idx] = 0
                self.free.append(block)

    def compute(self, texts: list[tuple[int, ...]], kept: list[tuple[int, int]], chunk_sizes: list[int]) -> list[torch.Tensor]:
        """All logits of all texts, as one batch, each in chunks of its own size."""
        self.tables = [[] for _ in texts]
        done, found = [0] * len(texts), [[] for _ in texts]
        while any(count < len(text) for count, text in zip(done, texts, strict=True)):
            rows, members = [], [seq for seq, text in enumerate(texts) if done[seq] < len(text)]
            for seq in members:
                sink, window = kept[seq]
                if window:
                    self.give_back(seq, done[seq], sink, window)
                part = texts[seq][done[seq] : done[seq] + chunk_sizes[seq]]
                self.grow(seq, done[seq] + len(part))
                rows.append(ScheduledRow(part, done[seq], np.array(self.tables[seq], np.int32), WantLogits.ALL))
            batch = build_batch(rows, self.block_size)
            sinks, windows = (np.array(column, np.int32) for column in zip(*(kept[seq] for seq in members), strict=True))
            if (windows > 0).any():
                batch = dataclasses.replace(batch, retention=BatchRetention(sinks, windows))
            logits = self.runner.forward(batch)
            for seq, first, last in zip(members, batch.logit_start_loc[:-1], batch.logit_start_loc[1:], strict=True):
                found[seq].append(logits[first:last].clone())  # the next step may use its memory
                done[seq] += int(last - first)
        return [torch.cat(parts) for parts in found]


def error_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return float(torch.stack([(f - e).abs().max() for f, e in zip(found, expected, strict=True)]).max())


def test_the_reference_without_retention_is_transformers(world: World) -> None:
    """Else it proves nothing."""
    assert float((world.expected[-1] - world.whole).abs().max()) <= 1e-5


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("chunk_size", [1, 5, 200])
def test_logits_are_those_of_positions_within_the_cache(world: World, block_size: int, chunk_size: int) -> None:
    tables = Tables(world.model, block_size)
    found = tables.compute(world.texts, KEPT, [chunk_size] * len(KEPT))
    assert error_of(found, world.expected) <= BOUND


def test_prompts_and_decodes_in_one_batch(world: World) -> None:
    found = Tables(world.model, 4).compute(world.texts, KEPT, [1, 1, 6, 1, 3, 9, 1])
    assert error_of(found, world.expected) <= BOUND


def test_what_is_computed_again_is_the_same(world: World) -> None:
    """A preempted sequence starts again from its tokens, in other chunks: its K and V depend on nothing else."""
    one, other = Tables(world.model, 4), Tables(world.model, 4)
    seq = KEPT.index((5, 11))
    text, kept = world.texts[seq], KEPT[seq]
    (first,) = one.compute([text], [kept], [1])
    (again,) = other.compute([text], [kept], [13])
    assert error_of([again], [first]) <= 1e-5
    for idx, (block, same) in enumerate(zip(one.tables[0], other.tables[0], strict=True)):
        if block and same:
            left = len(text) - idx * 4
            assert float((one.view[block][:, :, :left] - other.view[same][:, :, :left]).abs().max()) <= 1e-5


def test_no_more_blocks_than_sink_and_window_need(world: World) -> None:
    for (sink, window), text in zip(KEPT, world.texts, strict=True):
        if window:
            tables = Tables(world.model, 4)
            tables.compute([text], [(sink, window)], [1])
            assert tables.most_held <= -(-sink // 4) + (window - 1) // 4 + 2


@pytest.mark.parametrize("wrong", [(4, 8), (6, 8), (5, 7), (5, 9)])
def test_one_token_more_or_less_shows(world: World, wrong: tuple[int, int]) -> None:
    """A thousand bounds from the first token on at which it makes a difference."""
    text = world.texts[KEPT.index((4, 8))]
    found = Tables(world.model, 4).compute([text] * 2, [(5, 8), wrong], [1, 1])
    assert float((found[0] - found[1]).abs().max()) > 1000 * BOUND


def test_sinks_at_their_old_positions_show(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeeper.engine_service.model.attention._sink_positions", lambda batch, _: batch.positions)
    seq = KEPT.index((5, 11))
    found = Tables(world.model, 4).compute([world.texts[seq]], [KEPT[seq]], [1])
    assert error_of(found, [world.expected[seq]]) > 100 * BOUND


@pytest.mark.parametrize("position", [4000, 4095, 4096, 4100, 1_000_000])
def test_far_positions_do_not_drift(position: int) -> None:
    """A query and a key are to each other what they are at the beginning, on both sides of the table's end and across it."""
    table = RotaryTable(RopeConfig(10_000.0), 16, torch.float32, torch.device("cpu"), 512)
    q, k = torch.randn(2, 1, 2, 16, generator=torch.Generator().manual_seed(0))

    def score(places: list[int]) -> torch.Tensor:
        cos, sin = table.rows(torch.tensor(places), max(places))
        return (rotary(q, cos[:1], sin[:1]) * rotary(k, cos[1:], sin[1:])).sum(-1)

    assert float((score([position, position - 9]) - score([9, 0])).abs().max()) < 1e-3 * (position <= 4200) + 1e-5
