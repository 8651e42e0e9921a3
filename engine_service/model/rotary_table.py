"""Cosines and sines of the rotary embedding, by position, in the form that kernels.activations.rotary takes."""

import math

import torch

from .rope_config import RopeConfig

_LEAST_TABLE = 4096  # positions


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position [head_dim / 2] of the head_dim dimensions that are rotated, float32, computed in transformers' order.

    llama3 divides long wavelengths by `factor`, keeps short ones, and blends in between (Llama 3.1); yarn does the same between
    two counts of turns within the original length (Peng et al., 2023).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32) * rope.theta**exponents)
    freqs = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "proportional":
        freqs[int(rope.part * head_dim // 2) :] = 0  # as many pairs turn as are the part of the head
        return freqs / rope.factor
    if rope.kind == "yarn":
        divided = 1.0 / (rope.factor * rope.theta**exponents)
        kept = 1 - _yarn_ramp(rope, head_dim)
        return divided * (1 - kept) + freqs * kept
    if rope.kind == "llama3":
        wavelens = 2 * math.pi / freqs
        low, high = rope.low_freq_factor, rope.high_freq_factor
        long, short = rope.original_max_position / low, rope.original_max_position / high
        blend = (rope.original_max_position / wavelens - low) / (high - low)
        blended = (1 - blend) * freqs / rope.factor + blend * freqs
        freqs = torch.where(wavelens > long, freqs / rope.factor, torch.where(wavelens < short, freqs, blended))
    return freqs


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """How much each frequency is divided [head_dim / 2]: 0 up to beta_fast's, 1 from beta_slow's on."""

    def find_place(num_turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = find_place(rope.beta_fast), find_place(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # transformers' own way around a division by zero
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def rotated_order(head_dim: int, rotated_dim: int) -> torch.Tensor:
    """Where each dimension of a head comes from [head_dim], so that the rotated pairs are half a head apart.

    The kernels rotate dimension i with i + head_dim / 2; a model that rotates its first `rotated_dim` dimensions pairs i with
    i + rotated_dim / 2. Scores do not depend on the order of dimensions, as long as queries and keys have the same.
    """
    first, second = torch.arange(rotated_dim).chunk(2)
    third, fourth = torch.arange(rotated_dim, head_dim).tensor_split(2)
    return torch.cat((first, third, second, fourth))


class RotaryTable:
    """Rows (cos, cos) and (-sin, sin) of the positions seen so far; grows by doubling, up to the model's last position.

    Growing keeps a model of a million positions from paying for them at start. Farther ones, to which a sequence with sink and
    window comes, are worked out when they are asked for, and in float64: only differences of angles count there, and in float32
    an angle of 100,000 is off by 0.004.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int,
        num_positions: int = 1024,
    ) -> None:
        num_still = (head_dim - rope.rotated_dim(head_dim)) // 2  # pairs that are not rotated: by 0, and not scaled
        freqs = inverse_frequencies(rope, rope.rotated_dim(head_dim))
        self._freqs = torch.cat((freqs, torch.zeros(num_still)))
        self._magnitude = torch.cat((torch.full_like(freqs, rope.magnitude), torch.ones(num_still)))
        self._dtype, self._device = dtype, device
        self._most = max(max_position, _LEAST_TABLE)
        self._fill(num_positions)
        self._reserved: tuple[torch.Tensor, torch.Tensor] | None = None

    def reserve(self, num_positions: int) -> int:
        """Grow to at least so many positions, or to the model's last one, and keep their memory. How many there are."""
        if self._cos.shape[0] < min(num_positions, self._most):
            self._fill(min(num_positions, self._most))
        self._reserved = self._cos, self._sin  # captured graphs read it, also once farther positions have a larger table
        return self._cos.shape[0]

    def rows(self, positions: torch.Tensor, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [T, head_dim], for int64 positions [T], the highest of which is `max_position`."""
        if max_position >= self._cos.shape[0] and self._cos.shape[0] < self._most:
            self._fill(min(1 << max_position.bit_length(), self._most))
        if max_position >= self._most:
            return self._far_rows(positions)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _far_rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin where at least one position is beyond the table."""
        inside, is_near = positions.clamp(max=self._most - 1), (positions < self._most)[:, None]
        cos, sin = self._columns(positions.double()[:, None] * self._freqs.to(positions.device, torch.float64))
        near_cos, near_sin = self._cos.index_select(0, inside), self._sin.index_select(0, inside)
        return torch.where(is_near, near_cos, cos), torch.where(is_near, near_sin, sin)

    def _fill(self, num_positions: int) -> None:
        self._cos, self._sin = self._columns(torch.arange(num_positions, dtype=torch.float32)[:, None] * self._freqs)

    def _columns(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        magnitude = self._magnitude.to(angles.device)
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        cos = torch.cat((cos, cos), dim=-1).to(self._device, self._dtype)
        return cos, torch.cat((-sin, sin), dim=-1).to(self._device, self._dtype)
