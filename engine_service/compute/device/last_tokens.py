"""LastTokens: the token that was drawn last for each row, where the model computes.

A step that runs ahead goes on from tokens that the host has not read: the step before leaves them here, by the row of their
sequence, and the later one picks them up, in the order of the device. A row that draws nothing keeps what is there.
"""

import numpy as np
import numpy.typing as npt
import torch

from .upload import at_device


class LastTokens:
    """int64 [rows], as many as there were; of zeros at first."""

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
