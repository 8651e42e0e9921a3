"""What the device keeps of each row, so that a step that runs ahead needs no host: its last token, and counts of its tokens.

TokenCounts: how often each token stands in the histories of penalised rows, where the model computes.

A sequence that is penalised has a slot, from the first step that draws for it by column. Its history only grows while it has
its row, and such a step counts the token that it computes. So the host brings what is missing before that token: the whole
history of a sequence that came, or what steps in between have drawn, and mostly nothing. Slots are few; one that the step does
not need is taken from the sequence that has it. The host's side is brought up to date when a step is staged, in the order of
steps, and the device's when it is run. A step that was staged and not run leaves them apart: then all is forgotten, and brought
anew.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from kvkeeper.kernels.penalise_counted import IN_PROMPT, ONE_MORE

from ...values.batch import Batch
from ...values.sampling_params import NOTHING_AWAITED, PenalisedRows
from .upload import at_device


class LastTokens:
    """The token that was drawn last for each row, int64 [rows], as many as there were; of zeros at first.

    A step that runs ahead goes on from tokens that the host has not read: the step before leaves them here, by the row of their
    sequence, and the later one picks them up, in the order of the device. A row that draws nothing keeps what is there.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """device: None: that of the first tokens."""
        self._tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self._has_device, self._stays = device is not None, False

    @property
    def tensor(self) -> torch.Tensor:
        return self._tokens

    def fix(self, num_rows: int) -> None:
        """Have so many rows for good, at an address that stays."""
        self._reserve(num_rows)
        self._stays = True

    def copied(self) -> "LastTokens":
        """A copy of them as they are now, whatever the next step leaves."""
        copied = LastTokens(self._tokens.device)
        copied._tokens = self._tokens.clone()
        return copied

    def _reserve(self, num_rows: int) -> None:
        if num_rows > len(self._tokens):
            assert not self._stays, "a graph has the address"
            grown = self._tokens.new_zeros(num_rows)
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown

    def put(self, rows: npt.NDArray[np.integer], token_ids: torch.Tensor) -> None:
        """These rows [n] have drawn token_ids, int64 [n]."""
        if not len(rows):
            return
        if not self._has_device:
            self._tokens, self._has_device = self._tokens.to(token_ids.device), True
        if (most := int(rows.max())) >= len(self._tokens):
            self._reserve(1 << (most + 1).bit_length())
        self._tokens.index_copy_(0, at_device(rows, self._tokens), token_ids)

    def known(self, batch: Batch) -> Batch:
        """The batch with all of its tokens, for a model that takes them from the host, which waits for a device."""
        if batch.awaited_rows is None:
            return batch
        return replace(batch, token_ids=self.filled(batch.token_ids, batch.awaited_rows), awaited_rows=None)

    def filled(self, token_ids: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """token_ids [n], and where rows [n] are not -1, what those drew; on the host, which waits for a device."""
        if not len(self._tokens):
            return token_ids
        return np.where(rows >= 0, self._tokens.cpu().numpy()[rows], token_ids)

    def filled_there(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """As filled, of tensors where the tokens are; the host does not wait."""
        if not len(self._tokens):
            return token_ids
        return torch.where(rows >= 0, self._tokens[rows.clamp(min=0)], token_ids)


_MOST_BYTES = 1 << 27  # on the device: 256 slots of a vocabulary of 131,072, or 512 where sequences are short
_MOST_COUNTED_SHORT = (1 << 14) - 1  # of a token, in two bytes
_NO_SERIAL = 0  # serials begin at 1
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CountedRows:
    """P penalised rows of a step, as penalise_counted takes them.

    Attributes:
        where: int64 [P], their rows of the logits.
        slots: int64 [P]. addends: int64 [P], ONE_MORE where the token that the step computes is of the output.
        tokens: int64 [P], that token, where the host knows it. awaited: int64 [P], see PenalisedRows, where it does not.
        penalties: float32 [3, P].
    """

    where: Int64s
    slots: Int64s
    addends: Int64s
    tokens: Int64s
    awaited: Int64s
    penalties: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """Rows of a step that was staged.

    Attributes:
        counts: of all slots, on the device.
        bring: brings what the rows' counts miss, before their tokens are counted.
        forget: to be called where the step does not come to its end.
    """

    rows: CountedRows
    counts: torch.Tensor
    bring: Callable[[], None]
    forget: Callable[[], None]


@runtime_checkable
class Counting(Protocol):
    """A model's runner that counts tokens where it computes."""

    @property
    def counts(self) -> "TokenCounts | None": ...


class TokenCounts:
    """Counts of at most num_slots sequences at a time, in memory that stays where it is."""

    def __init__(self, most_rows: int, vocab_size: int, most_tokens: int, device: torch.device) -> None:
        """
        Args:
            most_rows: of a step; there are slots for so many, as far as their memory goes.
            most_tokens: of a sequence.
        """
        dtype = torch.int16 if most_tokens <= _MOST_COUNTED_SHORT else torch.int32
        self.num_slots = min(most_rows, _MOST_BYTES // (vocab_size * dtype.itemsize))
        # One slot more, of no sequence: rows without penalties read its zeros.
        self.tensor = torch.zeros((self.num_slots + 1, vocab_size), dtype=dtype, device=device)
        self._tokens: npt.NDArray[np.int32] | None = None  # the table whose sequences have the slots
        self._slot_of = np.zeros(0, np.int64)  # by row of the table; one that its sequence has lost has another's serial
        self._serials = np.zeros(self.num_slots, np.int64)
        self._num_counted = np.zeros(self.num_slots, np.int64)
        self._used_at = np.zeros(self.num_slots, np.int64)  # the turn that needed it last
        self._turn = 0

    @property
    def padding_slot(self) -> int:
        """The slot of rows without penalties."""
        return self.num_slots

    def forget(self) -> None:
        """Whatever was counted counts no more."""
        self._serials[:] = _NO_SERIAL

    def stage(self, rows: PenalisedRows) -> Counted | None:
        """The rows of the next step in the device's order.

        None: the rows have no serials, or there are not enough slots; nothing was done.
        """
        if rows.serials is None or len(rows) > self.num_slots:
            return None
        self._turn += 1
        if rows.tokens is not self._tokens:
            self.forget()
            self._tokens, self._slot_of = rows.tokens, np.zeros(len(rows.tokens), np.int64)
        # The newest token is the one that the step computes, unless the prompt ends with it, which is brought whole.
        lens = rows.lens
        has_output = lens > rows.num_prompts
        assert ((rows.awaited == NOTHING_AWAITED) | has_output).all(), "what is drawn is output"
        ends = lens - has_output
        slots = self._slot_of[rows.which]
        bring: Callable[[], None] = _nothing
        if not ((self._serials[slots] == rows.serials) & (self._num_counted[slots] == ends)).all():
            slots, bring = self._bring(rows, ends)
        self._used_at[slots] = self._turn
        self._num_counted[slots] = lens
        addends = np.where(has_output, ONE_MORE, 0)
        tokens = rows.tokens[rows.which, np.maximum(rows.num_known, 1) - 1].astype(np.int64)
        counted = CountedRows(rows.where, slots, addends, tokens, rows.awaited, rows.penalties)
        return Counted(counted, self.tensor, bring, self.forget)

    def _bring(self, rows: PenalisedRows, ends: Int64s) -> tuple[Int64s, Callable[[], None]]:
        """A slot for each row, and the call that counts its tokens up to `ends` [P]."""
        assert rows.serials is not None
        slots = self._slot_of[rows.which]
        is_held = self._serials[slots] == rows.serials
        is_fresh = ~is_held | (self._num_counted[slots] > ends)  # what was counted too far cannot be taken back
        if len(coming := np.flatnonzero(~is_held)):
            self._used_at[slots[is_held]] = self._turn
            free = np.argsort(self._used_at, kind="stable")[: len(coming)]  # none of this turn: there are slots enough
            self._serials[free] = rows.serials[coming]
            self._slot_of[rows.which[coming]] = slots[coming] = free
        firsts = np.where(is_fresh, rows.num_prompts, self._num_counted[slots])
        cells: list[Int64s] = []
        marks: list[Int64s] = []
        vocab_size = self.tensor.shape[1]
        for at in np.flatnonzero(is_fresh | (firsts < ends)).tolist():
            own, base = rows.tokens[rows.which[at]], slots[at] * vocab_size
            if is_fresh[at]:
                marks.append(base + own[: rows.num_prompts[at]].astype(np.int64))
            cells.append(base + own[firsts[at] : ends[at]].astype(np.int64))
        brought = np.concatenate([slots[is_fresh], *marks, *cells])
        num_fresh, num_marks = int(is_fresh.sum()), sum(map(len, marks))

        def bring() -> None:
            there = at_device(brought, self.tensor)
            fresh, prompt, output = there.split([num_fresh, num_marks, len(brought) - num_fresh - num_marks])
            flat = self.tensor.view(-1)
            self.tensor.index_fill_(0, fresh, 0)
            flat.index_fill_(0, prompt, IN_PROMPT)  # a token that is there twice is marked once
            flat.index_add_(0, output, flat.new_full((len(output),), ONE_MORE))

        return slots, bring


def _nothing() -> None:
    """Nothing is missing."""
