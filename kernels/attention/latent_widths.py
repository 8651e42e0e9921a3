"""LatentWidths: the sizes of latent attention, in plain integers, and what they say of the cheaper way."""

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

    def prefers_expanded(self, num_queries: int, num_keys: int) -> bool:
        """Whether so many queries on so many keys are computed faster with keys and values of their own: by multiplications.

        Bringing queries into the latents' space, and outputs back, costs per query what expanding costs per key.
        """
        per_pair = 2 * self.latent + self.rope, self.key + self.rope + self.value
        per_token = self.latent * (self.key + self.value)
        absorbed = num_queries * (num_keys * per_pair[0] + per_token)
        return num_keys * (num_queries * per_pair[1] + per_token) < absorbed
