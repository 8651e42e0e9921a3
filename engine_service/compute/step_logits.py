"""StepLogits: a step's logits, with what a captured graph has found in them already."""

from dataclasses import dataclass

import torch

NOT_FINITE = -1  # in the place of a token: the logits are not finite


@dataclass(frozen=True, slots=True, eq=False)
class StepLogits:
    """The logits of R rows.

    Attributes:
        values: float32 [R, vocab_size].
        likeliest: int64 [R], a token also where the logits are not finite; None: they were not looked at.
        told: likeliest, but NOT_FINITE where the logits are not; None likewise.
        drawn: int64 [R], each row's token by the parameters that a graph was given, and told is of these; None: by none.
    """

    values: torch.Tensor
    likeliest: torch.Tensor | None = None
    told: torch.Tensor | None = None
    drawn: torch.Tensor | None = None

    def first(self, count: int) -> "StepLogits":
        """The same of the first rows."""
        parts = (self.values, self.likeliest, self.told, self.drawn)
        return StepLogits(*(part if part is None else part[:count] for part in parts))  # type: ignore[arg-type]


def with_likeliest(values: torch.Tensor) -> StepLogits:
    """These logits with the first of the likeliest tokens of each row."""
    likeliest = values.argmax(dim=1)
    is_finite = torch.isfinite(values.amax(dim=1))  # NaN and +inf win a maximum; -inf only if all are
    return StepLogits(values, likeliest, torch.where(is_finite, likeliest, NOT_FINITE))
