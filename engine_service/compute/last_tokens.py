"""LastTokens: the token that was drawn last for each row, where the model computes.

A step that runs ahead goes on from tokens that the host has not read: the step before leaves them here, by the row of their
sequence, and the later one picks them up, in the order of the device. A row that draws nothing keeps what is there.
"""

import numpy as np
import numpy.typing as npt
import torch


class LastTokens:
    """int64 [rows], as many as there were; of zeros at first."""

    def __init__(self, device: torch.device | str = "cpu", num_rows: int = 0) -> None:
        """num_rows: that are there from the beginning, at an address that stays for as long as there are no more."""
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    @property
    def tensor(self) -> torch.Tensor:
        return self._tokens

    def put(self, rows: npt.NDArray[np.integer], token_ids: torch.Tensor) -> None:
        """These rows [n] have drawn token_ids, int64 [n]."""
        if len(rows):
            self._reserve(int(rows.max()) + 1)
            self._tokens.index_copy_(0, torch.from_numpy(rows), token_ids)

    def filled(self, token_ids: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """On the host: token_ids [n], and in the places of rows [n] that are not -1 the last tokens of these rows."""
        if not len(self._tokens):
            return token_ids
        return np.where(rows >= 0, self._tokens.cpu().numpy()[rows], token_ids)

    def _reserve(self, num_rows: int) -> None:
        if num_rows > len(self._tokens):
            grown = self._tokens.new_zeros(1 << num_rows.bit_length())
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown
