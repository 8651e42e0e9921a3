"""What storing K and V in fewer bits costs in quality, by length of the context: perplexity, needles, attention's error.

A model reads texts with every token given, in short chunks, on memory of this module's own that is laid out as the cache
service's is. The tail is what an engine would have: the blocks of the newest tokens, as of the beginning of each chunk.
Everything is compared with the same model, texts and chunks with K and V as they are computed.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvkeeper.engine_service.compute.model_runner import AnyLayout, ModelRunner, make_kv_layout
from kvkeeper.engine_service.compute.stored_model import format_for, has_states, stored_layout
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from kvkeeper.engine_service.model.dtype_name import DtypeChoice
from kvkeeper.engine_service.model.layer_groups import LayerGroup
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.values.batch import Batch
from kvkeeper.kernels.layout import KvLayout
from tests.benchmarks.attention_alone import AloneError, AttentionInputs, error_alone

Tokens = npt.NDArray[np.int64]
_BLOCK_SIZE = 16
_CHUNK = 32  # tokens; all of a chunk see the tail that the first of them has
_SAMPLED = 13  # of so many tokens one has its attention compared
EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Way:
    """A way of storing K and V. kv_dtype: of --kv-dtype, or EXACT; dtype: that the whole model computes in."""

    kv_dtype: str = EXACT
    tail_tokens: int = 0
    dtype: DtypeChoice = "float32"

    @property
    def name(self) -> str:
        if self.kv_dtype == EXACT:
            return EXACT if self.dtype == "float32" else f"all of the model in {self.dtype}"
        return f"{self.kv_dtype}, tail {self.tail_tokens}" if self.tail_tokens else self.kv_dtype


@dataclass(frozen=True, slots=True)
class Needle:
    """A text with a sentence to be found again: `tokens` [T] end where the answer, `answer` [A], is to follow."""

    tokens: Tokens
    answer: Tokens


@dataclass(slots=True)
class Measured:
    """Of one way and one length of the context.

    Attributes:
        bits: of each token that ends so far in its text at most, and further than the next shorter length.
        found: of each needle in a text of that length, the share of its answer's tokens that are the likeliest.
        greatest_error, mean_error: of the attention outputs, against the root mean square of the exact ones.
        alone: the same of each attention by itself, on the inputs of the exact model; None where no text is so long.
    """

    way: Way
    length: int
    bits: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    greatest_error: float = 0.0
    mean_error: float = 0.0
    alone: AloneError | None = None

    @property
    def perplexity(self) -> float:
        return float(2 ** np.mean(self.bits)) if self.bits else math.nan

    @property
    def recall(self) -> float:
        return float(np.mean(self.found)) if self.found else math.nan


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of one text.

    Attributes:
        bits: of each next token [T - 1].
        outputs: of some tokens the attention outputs of each layer [layers, n, N * D].
        queries: theirs, rotated [layers, n, N, D], float32.
        keys, values: [layers, T, M, D], where they are stored as they are computed.
    """

    bits: npt.NDArray[np.float64]
    outputs: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor | None
    values: torch.Tensor | None


def measure(
    folder: Path,
    ways: Sequence[Way],
    texts: Sequence[Tokens],
    needles: Sequence[Needle],
    lengths: Sequence[int],
    on_read: Callable[[], object] = lambda: None,
) -> Iterator[Measured]:
    """Each way at each length, the exact way first. Raises ModelError.

    texts: token ids [T] each, as long as the greatest length or shorter. on_read: called when a way has read one, or a needle.
    """
    lengths = sorted(lengths)
    exact: list[_Seen] = []
    first_reader: _Reader | None = None
    for way in (Way(), *ways):
        reader = _Reader(folder, way, max([*map(len, texts), *(len(each.tokens) + len(each.answer) for each in needles)]))
        seen, found = [], []
        for text in texts:
            seen.append(reader.read(text))
            on_read()
        for needle in needles:
            found.append((len(needle.tokens), reader.recall(needle)))
            on_read()
        first_reader, exact = first_reader or reader, exact or seen
        shortest = 0
        for length in lengths:
            of_length = [share for at, share in found if shortest < at <= length]
            measured = _compared(way, shortest, length, seen, exact, of_length)
            inputs = [each for text in exact for each in first_reader.inputs_of(text, shortest, length, reader.window)]
            if inputs:
                measured.alone = error_alone(inputs, format_for(way.kv_dtype, torch.float32), reader.dtype)
            yield measured
            shortest = length


def _compared(
    way: Way, shortest: int, length: int, seen: Sequence[_Seen], exact: Sequence[_Seen], found: list[float]
) -> Measured:
    measured = Measured(way, length, found=found)
    errors, squares, count = [], 0.0, 0
    for ours, theirs in zip(seen, exact, strict=True):
        measured.bits += ours.bits[shortest:length].tolist()
        part = slice(-(-shortest // _SAMPLED), -(-length // _SAMPLED))
        errors.append((ours.outputs[:, part] - theirs.outputs[:, part]).abs())
        squares += float(theirs.outputs[:, part].double().square().sum())
        count += theirs.outputs[:, part].numel()
    if count:
        unit = math.sqrt(squares / count)
        measured.greatest_error = max(float(each.max()) for each in errors if each.numel()) / unit
        measured.mean_error = sum(float(each.double().sum()) for each in errors) / count / unit
    return measured


class _Reader:
    """A model that stores its K and V in one way, on its own memory."""

    def __init__(self, folder: Path, way: Way, most_tokens: int) -> None:
        decoder, config = load_model(folder, dtype=way.dtype, progress=False)
        if has_states(config):
            raise UnsupportedModelError("the quality of model type", config.family, "families without recurrent layers")
        kv_format = format_for(way.kv_dtype, decoder.dtype)
        groups: tuple[LayerGroup, ...] = ()
        layout: AnyLayout = make_kv_layout(config, decoder.dtype, _BLOCK_SIZE)
        if kv_format is not None:
            layout, groups = stored_layout(decoder, kv_format, _BLOCK_SIZE, way.tail_tokens)
        self._decoder, self._num_groups = decoder, max(len(groups), 1)
        self.window = groups[-1].window if groups else None  # of the tail, in tokens; None: there is none
        self.dtype = decoder.dtype
        self._num_entries = -(-most_tokens // _BLOCK_SIZE)
        num_blocks = 1 + self._num_groups * self._num_entries
        memory = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8)
        self._view = layout.view(memory)
        self._is_plain = isinstance(layout, KvLayout)
        self._runner = ModelRunner(decoder, self._view, layout, groups)
        self._tables = np.arange(1, num_blocks, dtype=np.int32).reshape(self._num_groups, self._num_entries)

    def read(self, text: Tokens) -> _Seen:
        """Bits and attention outputs; text [T]."""
        outputs: list[list[torch.Tensor]] = [[] for _ in range(self._decoder.config.num_layers)]
        queries: list[list[torch.Tensor]] = [[] for _ in outputs]
        bits: list[npt.NDArray[np.float64]] = []
        for first in range(0, len(text), _CHUNK):
            last = min(first + _CHUNK, len(text))
            rows = torch.arange(first, last)
            chosen = torch.nonzero(rows % _SAMPLED == 0).flatten()

            def keep(layer: int, q: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor = chosen) -> None:
                outputs[layer].append(out[chosen].float())
                queries[layer].append(q[chosen].float())

            self._decoder.watch = keep
            logits = self._runner.forward(self._batch(text, first, last)).double()
            self._decoder.watch = None
            following = torch.from_numpy(text[first + 1 : last + 1])
            losses = torch.nn.functional.cross_entropy(logits[: len(following)], following, reduction="none")
            bits.append((losses / math.log(2)).numpy())
        whole_outputs, whole_queries = (torch.stack([torch.cat(parts) for parts in kept]) for kept in (outputs, queries))
        keys = values = None
        if self._is_plain:
            blocks = torch.from_numpy(self._tables[0, : -(-len(text) // _BLOCK_SIZE)].astype(np.int64))
            keys, values = (self._view[blocks, :, side].transpose(0, 1).flatten(1, 2)[:, : len(text)] for side in (0, 1))
        return _Seen(np.concatenate(bits), whole_outputs, whole_queries, keys, values)

    def inputs_of(self, seen: _Seen, shortest: int, length: int, tail_window: int | None) -> Iterator[AttentionInputs]:
        """What the layers' attention was given for the compared tokens of a text from `shortest` on, below `length`.

        tail_window: of the tail that a way has; it is there as of the beginning of each chunk.
        """
        assert seen.keys is not None and seen.values is not None, "of the exact way"
        part = slice(-(-shortest // _SAMPLED), -(-length // _SAMPLED))
        positions = torch.arange(seen.queries.shape[1])[part] * _SAMPLED
        starts = torch.full_like(positions, seen.keys.shape[1])
        if tail_window is not None:
            chunks = positions // _CHUNK * _CHUNK
            starts = (chunks - tail_window + 1).clamp(min=0) // _BLOCK_SIZE * _BLOCK_SIZE
        config = self._decoder.config
        for layer in range(config.num_layers) if len(positions) else ():
            yield AttentionInputs(
                seen.queries[layer, part],
                seen.keys[layer],
                seen.values[layer],
                positions,
                starts,
                config.scale,
                config.windows[layer],
                config.attention_soft_cap,
                self._decoder.sink_logits[layer],
            )

    def recall(self, needle: Needle) -> float:
        """The share of the answer's tokens that are the likeliest, where those before them are given."""
        whole, asked = np.concatenate((needle.tokens, needle.answer)), len(needle.tokens) - 1
        likeliest = [
            self._runner.forward(self._batch(whole, first, min(first + _CHUNK, len(whole)), asked)).argmax(1).numpy()
            for first in range(0, len(whole), _CHUNK)
        ]
        return float((np.concatenate(likeliest)[:-1] == needle.answer).mean())

    def _batch(self, text: Tokens, first: int, last: int, asked: int = 0) -> Batch:
        """The tokens [first, last) with the logits of those from `asked` on."""
        positions = np.arange(first, last)
        entries = positions // _BLOCK_SIZE
        num_entries = -(-last // _BLOCK_SIZE)
        tables = self._tables[:, :num_entries].copy()
        if self.window is not None:
            tables[1:, : max(first - self.window + 1, 0) // _BLOCK_SIZE] = 0
        slots = tables[:, entries].astype(np.int64) * _BLOCK_SIZE + positions % _BLOCK_SIZE
        logit_rows = np.arange(min(max(asked - first, 0), len(positions)), len(positions))
        batch = Batch(
            token_ids=text[positions],
            positions=positions,
            slot_mapping=slots[0],
            query_start_loc=np.array([0, len(positions)], np.int32),
            seq_lens=np.array([last], np.int32),
            block_tables=tables[:1],
            logit_rows=logit_rows,
            logit_start_loc=np.array([0, len(logit_rows)], np.int32),
        )
        if self._num_groups == 1:
            return batch
        return dataclasses.replace(batch, group_tables=tables[None, 1:], group_slots=slots[1:])
