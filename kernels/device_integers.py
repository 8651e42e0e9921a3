"""How a weight of 8 or 4 bits lies on a device: words of integers, whose inputs are 16 apart, for gpu/integer_linear.py.

Plain tensors and torch's ops: knows no kernel, and not how integers are found.
"""

from typing import Final, Literal, NamedTuple

import torch
from torch.nn import functional

from .cpu.products import GROUP

_WORDS: Final = 16  # of an output in a slab: inputs that a product of tiles takes at a time
_PAIR: Final = 2 * GROUP  # inputs whose two scales lie in one word


class DeviceIntegers(NamedTuple):
    """A weight [O, I] of integers of `bits` bits, or with [E, ...] several; in slabs of 64 inputs for 8 bits, of 128 for 4.

    Attributes:
        words: int32 [slabs, O, 16]. The integer of input n * 16 + j of a slab lies in word j, n integers from its lowest bits
            on; 8 bits are 128 more than the integer. What is padded is any number.
        scales, lows: float16 [pairs of groups, O, 2]. A weight is its integer times its group's scale, plus the low, all times
            the factor of its output. lows: None for 8 bits.
        factors: float32 [O].
    """

    bits: Literal[8, 4]
    words: torch.Tensor
    scales: torch.Tensor
    lows: torch.Tensor | None
    factors: torch.Tensor

    @property
    def is_stacked(self) -> bool:
        return self.factors.dim() == 2

    def of_expert(self, expert: int) -> "DeviceIntegers":
        """The one of several weights, in the same memory."""
        lows = None if self.lows is None else self.lows[expert]
        return DeviceIntegers(self.bits, self.words[expert], self.scales[expert], lows, self.factors[expert])

    def write(
        self, first: int, integers: torch.Tensor, scales: torch.Tensor, lows: torch.Tensor, factors: torch.Tensor
    ) -> None:
        """Set R outputs from `first` on: integers [R, groups, GROUP], scales and lows [R, groups], factors [R]."""
        rows = slice(first, first + len(factors))
        num_slabs, per_word = len(self.words), 32 // self.bits
        numbers = integers.flatten(1).int() + (128 if self.bits == 8 else 0)
        padded = functional.pad(numbers, (0, num_slabs * _WORDS * per_word - numbers.shape[1]))
        places = padded.view(len(numbers), num_slabs, per_word, _WORDS).unbind(2)
        words = places[0]
        for place, each in enumerate(places[1:], 1):
            words = words | each << place * self.bits
        self.words[:, rows] = words.transpose(0, 1)
        for target, terms in ((self.scales, scales), (self.lows, lows)):
            if target is not None:
                padded = functional.pad(terms, (0, 2 * len(target) - terms.shape[1]))
                target[:, rows] = padded.unflatten(1, (-1, 2)).transpose(0, 1).half()
        self.factors[rows] = factors


def allocate_integers(bits: Literal[8, 4], shape: torch.Size, device: torch.device) -> DeviceIntegers:
    """Memory for a weight [O, I], or for several [E, O, I]."""
    *stacked, num_out, num_in = shape
    slab = _WORDS * 32 // bits
    num_slabs = -(-num_in // slab)
    words = torch.empty((*stacked, num_slabs, num_out, _WORDS), dtype=torch.int32, device=device)
    scales = torch.empty((*stacked, num_slabs * slab // _PAIR, num_out, 2), dtype=torch.float16, device=device)
    lows = torch.empty_like(scales) if bits == 4 else None
    return DeviceIntegers(bits, words, scales, lows, torch.empty((*stacked, num_out), device=device))
