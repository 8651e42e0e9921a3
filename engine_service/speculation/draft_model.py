"""DraftModel: a small model of the same vocabulary that guesses the large model's next tokens.

It guesses greedily. Its K and V are shared with nothing and worth little, so they stay in memory of its own, a fixed run of
blocks for each of a few sequences. Which part of them is still good is found by comparing tokens, so no end, preemption or
resumption has to be reported to it. Guessing pays for few sequences at once, so there are few places; a sequence without a
place gets no guesses.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ..compute.model_runner import Runner, StepBounds
from ..compute.served_model import ServedModel
from ..values.batch import Batch
from ..values.request import NO_TOKENS, Int32Array

_NUM_PLACES = 16
_BLOCK_SIZE = 16
_CHUNK = 512  # tokens of one sequence in one forward pass


@dataclass(slots=True)
class _Place:
    """Where one sequence's K and V are: tables [groups of layers, max_blocks]; good for the tokens computed."""

    tables: Int32Array
    row: int | None = None
    computed: Int32Array = field(default_factory=lambda: NO_TOKENS)  # tokens whose K and V are there
    last_use: int = 0


class DraftModel:
    """A speculator.Proposer. Not thread-safe: it computes in the engine's worker thread."""

    is_slow = True

    def __init__(self, model: ServedModel, max_len: int) -> None:
        layout = model.layout(_BLOCK_SIZE)
        max_blocks = -(-max_len // _BLOCK_SIZE)
        shape = _NUM_PLACES, max(len(model.groups), 1), max_blocks
        num_bytes = (1 + math.prod(shape)) * layout.block_bytes
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=model.device)
        self._runner: Runner = model.make_runner(layout.view(memory), layout)
        self._model, self._max_len = model, max_len
        self._places = [_Place(tables) for tables in np.arange(1, 1 + math.prod(shape), dtype=np.int32).reshape(shape)]
        self._num_calls = 0

    def make_ready(self) -> None:
        """Do what a device needs before the first guess, so that no kernel is compiled while requests wait."""
        if self._model.make_ready is not None:
            bounds = StepBounds(_NUM_PLACES, self._max_len, _NUM_PLACES * _CHUNK, may_retain=False)
            self._model.make_ready(self._runner, bounds)

    def propose(self, histories: Mapping[int, Int32Array], most: Mapping[int, int]) -> dict[int, Int32Array]:
        """See speculator.Proposer."""
        self._num_calls += 1
        places = self._find_places(histories)
        tokens = {row: histories[row] for row in places}
        num_ahead = {row: min(most[row], self._max_len - len(tokens[row])) for row in places}
        for _ in range(max(num_ahead.values(), default=0)):
            asked = [row for row in places if len(tokens[row]) - len(histories[row]) < num_ahead[row]]
            for row, token_id in self._next_tokens({row: (places[row], tokens[row]) for row in asked}).items():
                tokens[row] = np.append(tokens[row], token_id).astype(np.int32)
        return {row: tokens[row][len(histories[row]) :] for row in places if len(tokens[row]) > len(histories[row])}

    def _find_places(self, histories: Mapping[int, Int32Array]) -> dict[int, _Place]:
        """The place of each row, the one it had before if it had one, else the one that was not used for longest."""
        kept = {place.row: place for place in self._places if place.row in histories}
        spare = sorted((place for place in self._places if place.row not in histories), key=lambda place: place.last_use)
        for row, place in zip((row for row in histories if row not in kept), spare, strict=False):
            place.row = row
            kept[row] = place
        found = {row: place for row, place in kept.items() if row is not None}
        for row, place in found.items():
            place.last_use = self._num_calls
            place.computed = place.computed[: _common(place.computed, histories[row])]
        return found

    def _next_tokens(self, asked: Mapping[int, tuple[_Place, Int32Array]]) -> dict[int, int]:
        """The likeliest token after each row's tokens, of which at least one is not computed yet."""
        while True:
            chunks = {row: min(len(tokens) - self._num_good(place, tokens), _CHUNK) for row, (place, tokens) in asked.items()}
            logits = self._forward(asked, chunks)
            if all(len(place.computed) == len(tokens) for place, tokens in asked.values()):
                return dict(zip(asked, logits.argmax(dim=1).tolist(), strict=True))

    def _num_good(self, place: _Place, tokens: Int32Array) -> int:
        """Computed tokens that need not be computed again; the last one's logits are wanted, so it always is."""
        return min(len(place.computed), len(tokens) - 1)

    def _forward(self, asked: Mapping[int, tuple[_Place, Int32Array]], chunks: Mapping[int, int]) -> torch.Tensor:
        """Compute the next tokens of each row; logits of the last of them, [len(asked), vocab_size]."""
        starts = [self._num_good(place, tokens) for place, tokens in asked.values()]
        counts = np.array([chunks[row] for row in asked], np.int32)
        seq_lens = np.array(starts, np.int32) + counts
        positions = np.concatenate([np.arange(start, end) for start, end in zip(starts, seq_lens.tolist(), strict=True)])
        width = -(-int(seq_lens.max()) // _BLOCK_SIZE)
        tables = np.stack([place.tables[:, :width] for place, _ in asked.values()])
        owners = np.repeat(np.arange(len(counts)), counts)
        blocks = tables[owners, :, positions // _BLOCK_SIZE].T.astype(np.int64)
        slots = blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE  # [groups, tokens]
        query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        batch = Batch(
            token_ids=np.concatenate(
                [tokens[start:end] for (_, tokens), start, end in zip(asked.values(), starts, seq_lens.tolist(), strict=True)]
            ).astype(np.int64),
            positions=positions,
            slot_mapping=slots[0],
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=np.ascontiguousarray(tables[:, 0]),
            logit_rows=(query_start_loc[1:] - 1).astype(np.int64),
            logit_start_loc=np.arange(len(counts) + 1, dtype=np.int32),
            group_tables=tables[:, 1:] if len(slots) > 1 else None,
            group_slots=slots[1:] if len(slots) > 1 else None,
        )
        logits = self._runner.forward(batch)
        for (place, tokens), end in zip(asked.values(), seq_lens.tolist(), strict=True):
            place.computed = tokens[:end].copy()
        return logits


def _common(a: Int32Array, b: Int32Array) -> int:
    """Length of the common beginning."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(np.argmax(differ)) if differ.any() else length
