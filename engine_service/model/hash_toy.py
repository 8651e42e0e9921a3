"""HashToyRunner: a model whose output proves its cache, with the interface of ModelRunner.

K of token i is a hash of K of token i - 1, read through the block table, and of the token: a hash of the whole
prefix. V is another hash of K. The next token is a hash of every K and V of the sequence, read through the table; with
retention of every one that its sinks and its window keep. So any wrong, stale, torn, shifted or unwritten slot changes the
output. Integers only: exact on every machine. Of several ranks each has all of it in its own arena, and where what one has read
there is not what the others have read, the token is another one. Each rank writes it in its own way, so that what one has of
another's is wrong, too.

expected_next_token says from the tokens alone which token the toy must return.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvkeeper.kernels.copy_blocks import copy_blocks
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.layout import KvLayout

from ..values.batch import Batch
from ..values.request import Retention
from .split import WHOLE, Split

_MASK: Final = (1 << 64) - 1
_SEED: Final = 0x9E3779B97F4A7C15
_LAYER_SALT: Final = 0xD1B54A32D192ED03
_VALUE_SALT: Final = 0x8CB92BA72F3D8DD7


@dataclass(frozen=True, slots=True)
class HashToyConfig:
    """vocab_size bounds the tokens; a slot of 4 elements of 2 bytes holds one 64-bit hash."""

    vocab_size: int = 512
    num_layers: int = 2
    max_position: int = 1 << 20

    def kv_layout(self, block_size: int) -> KvLayout:
        """The layout of the toy's arena: float16 only as a two-byte cell, its bits are a hash's."""
        return KvLayout(self.num_layers, num_kv_heads=1, head_dim=4, dtype=torch.float16, block_size=block_size)


class HashToyRunner:
    """The toy on an arena."""

    def __init__(self, config: HashToyConfig, kv_view: torch.Tensor, layout: KvLayout, split: Split = WHOLE) -> None:
        """
        Args:
            config: of the toy.
            split: the rank whose arena this is.
            kv_view: KvLayout.view of the arena.
            layout: config.kv_layout of any block size.

        Raises:
            KernelArgumentError: the arena's layout is not the toy's.
        """
        if layout != config.kv_layout(layout.block_size) or kv_view.shape[1:] != layout.view_shape:
            raise KernelArgumentError("hash_toy", "layout", f"{layout} is not {config.kv_layout(layout.block_size)}")
        self._config = config
        self._split = split
        self._mask = np.uint64(0 if split.is_first else _mix(split.rank))
        self._layout = layout
        self._kv_view = kv_view
        # [num_blocks, num_layers, 2, block_size], one hash per K and per V
        self._hashes = kv_view.view(torch.int64).squeeze((-2, -1)).numpy().view(np.uint64)

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def layout(self) -> KvLayout:
        return self._layout

    def forward(self, batch: Batch) -> torch.Tensor:
        """Write the batch's hashes into their slots, then read every sequence back through its table.

        Returns:
            Logits of batch.logit_rows, float32 [R, vocab_size]: 30 at the next token, 0 elsewhere.
        """
        for seq in range(len(batch.seq_lens)):
            self._write(batch, seq)
        found = np.zeros(len(batch.logit_rows), np.uint64)
        for seq in range(len(batch.seq_lens)):
            first, last = batch.logit_start_loc[seq : seq + 2].tolist()
            if first < last:
                positions = batch.positions[batch.logit_rows[first:last]]
                if batch.retention is not None and (window := int(batch.retention.window_lens[seq])):
                    kept = Retention(int(batch.retention.sink_lens[seq]), window)
                    digests = np.array([self._read(batch.block_tables[seq], _seen(at, kept))[-1] for at in positions.tolist()])
                else:
                    digests = self._read(batch.block_tables[seq], np.arange(int(batch.seq_lens[seq])))[positions]
                found[first:last] = digests
        next_tokens = self._agreed(found) % np.uint64(self.vocab_size)
        logits = torch.zeros(len(found), self.vocab_size)
        logits[torch.arange(len(found)), torch.from_numpy(next_tokens.astype(np.int64))] = 30.0
        return logits

    def _agreed(self, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The digests where those of all ranks are equal, and others where they are not."""
        if self._split.num_ranks == 1:
            return digests
        short = (digests >> np.uint64(8)).astype(np.int64)  # so that the sum of 64 ranks does not wrap
        total = self._split.together.add_up(torch.from_numpy(short.copy())).numpy()
        return np.where(total == short * self._split.num_ranks, digests, _mix_all(total.astype(np.uint64)))

    def synchronize(self) -> None:
        """Nothing is under way when a call has returned."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Run (source, destination) block copies in order; a later one sees what earlier ones wrote."""
        copy_blocks(self._kv_view, pairs)

    def _write(self, batch: Batch, seq: int) -> None:
        first, last = batch.query_start_loc[seq : seq + 2].tolist()
        block_size = self._layout.block_size
        start, table = int(batch.positions[first]), batch.block_tables[seq]
        blocks, offsets = np.divmod(batch.slot_mapping[first:last], block_size)
        tokens = batch.token_ids[first:last].tolist()
        for layer in range(self._config.num_layers):
            before = _SEED
            if start:
                before = int(self._hashes[table[(start - 1) // block_size], layer, 0, (start - 1) % block_size] ^ self._mask)
            keys = _chain(before, tokens, layer)
            self._hashes[blocks, layer, 0, offsets] = keys ^ self._mask
            self._hashes[blocks, layer, 1, offsets] = _mix_all(keys ^ np.uint64(_VALUE_SALT)) ^ self._mask

    def _read(self, table: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """The digest, for each of these positions [T], of the K and V of the positions up to it."""
        blocks, offsets = table[positions // self._layout.block_size], positions % self._layout.block_size
        layers = self._hashes.swapaxes(0, 1)
        return _digests([tuple(h[blocks, kind, offsets] ^ self._mask for kind in (0, 1)) for h in layers], positions)


def expected_next_token(
    token_ids: Sequence[int], config: HashToyConfig | None = None, retention: Retention | None = None
) -> int:
    """What the toy must return after `token_ids` (at least one), worked out without a cache."""
    config = config or HashToyConfig()
    last = len(token_ids) - 1
    seen = np.arange(last + 1) if retention is None else _seen(last, retention)
    layers = []
    for layer in range(config.num_layers):
        keys = _chain(_SEED, list(token_ids), layer)
        layers.append((keys[seen], _mix_all(keys[seen] ^ np.uint64(_VALUE_SALT))))
    return int(_digests(layers, seen)[-1] % np.uint64(config.vocab_size))


def _seen(position: int, kept: Retention) -> npt.NDArray[np.int64]:
    """Positions that the query at `position` sees."""
    first = max(position - kept.num_window_tokens + 1, 0)
    return np.concatenate((np.arange(min(kept.num_sink_tokens, first)), np.arange(first, position + 1)))


def _chain(before: int, tokens: list[int], layer: int) -> npt.NDArray[np.uint64]:
    """K of every token, each a hash of the one before it."""
    keys = np.empty(len(tokens), dtype=np.uint64)
    salt = _LAYER_SALT * (layer + 1)
    for index, token in enumerate(tokens):
        before = _mix(before * 31 + token + salt)
        keys[index] = before
    return keys


def _digests(
    layers: Sequence[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """Running sums of hashes of (position, K, V): a sum, so that all positions' digests cost one pass."""
    total = np.zeros(len(positions), dtype=np.uint64)
    places = _mix_all(positions.astype(np.uint64))
    for index, (keys, values) in enumerate(layers):
        salt = np.uint64(_LAYER_SALT * (index + 1) & _MASK)
        total += np.cumsum(_mix_all(_mix_all(keys ^ places ^ salt) + values), dtype=np.uint64)
    return _mix_all(total)


def _mix(value: int) -> int:
    """splitmix64's finaliser on a Python integer."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _mix_all(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """_mix of every element; unsigned arrays wrap silently."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
