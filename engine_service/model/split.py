"""Split: the part of a model that one rank of several computes (tensor parallelism, as in Megatron-LM, arXiv 1909.08053).

Owns which rows and columns of every matrix a rank has. Queries, keys, values, gate and up are cut by their outputs, so that a
rank has whole heads and a run of each MLP's inner width. The projections behind them are cut by their inputs, and what they
give is added up over the ranks, twice a layer. Experts are cut the same way, each by its width: all ranks then do equal work,
whichever experts the tokens choose. Where there are fewer KV heads than ranks, each is on several, and so are latents, which
all heads read. Norms and routers are whole on every rank. Of the vocabulary a rank has a run of rows, of the embeddings and of
the product that gives logits. A token is embedded by the rank that has its row, to which the others add zeros. The logits of
all rows are gathered by the first rank, which draws.

A split by layers (pipeline parallelism) would be a second kind of Split, with its own rule for which layers a rank has.
"""

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import torch

from .checkpoint.errors import UnsupportedModelError
from .config import ModelConfig


class Together(Protocol):
    """What ranks do together, with tensors of one shape. All call the same, equally often, in the same order."""

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """The sum, on all ranks, perhaps in the memory of what it was given."""

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """The parts by rank [num_ranks, ...], on the first rank; None on the others."""

    def share(self, given: torch.Tensor) -> torch.Tensor:
        """What the first rank gave, on all ranks, perhaps in the memory of what this one gave."""


class Alone:
    """One rank."""

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """The part itself."""
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """The one part."""
        return part[None]

    def share(self, given: torch.Tensor) -> torch.Tensor:
        """What was given."""
        return given


_ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Split:
    """A rank, 0 to num_ranks - 1."""

    rank: int = 0
    num_ranks: int = 1
    together: Together = _ALONE

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def of(self, total: int) -> range:
        """The rank's part of so many equal things, which the number of ranks divides."""
        size = total // self.num_ranks
        return range(self.rank * size, (self.rank + 1) * size)

    def of_vocabulary(self, total: int) -> range:
        """The rank's run of the vocabulary's rows. The last ones are shorter than num_rows where it does not divide."""
        size = self.num_rows(total)
        return range(min(self.rank * size, total), min((self.rank + 1) * size, total))

    def num_rows(self, vocab_size: int) -> int:
        """Rows of the vocabulary that each rank has memory for; those that it has none of are zeros."""
        return -(-vocab_size // self.num_ranks)

    def of_kv_heads(self, total: int) -> range:
        """The same of KV heads, which may be fewer than ranks."""
        if total >= self.num_ranks:
            return self.of(total)
        head = self.rank * total // self.num_ranks
        return range(head, head + 1)


WHOLE = Split()


def config_of_rank(config: ModelConfig, split: Split) -> ModelConfig:
    """What each rank's decoder is parameterised by: its own heads and widths.

    Raises UnsupportedModelError where the model cannot be cut into so many.
    """
    num_ranks = split.num_ranks
    if num_ranks == 1:
        return config
    if config.qk_norm == "whole":
        raise UnsupportedModelError("tensor parallelism of model type", config.family, "families without norms over all heads")
    _check_divides(num_ranks, "attention heads", config.num_heads)
    for num_kv_heads in sorted({config.kv_heads(layer)[0] for layer in range(config.num_layers)}):
        if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
            raise _refused(num_ranks, f"divisors or multiples of the {num_kv_heads} KV heads")
    recurrent = config.recurrent
    if recurrent is not None and recurrent.layers:
        for what, total in recurrent.shape.split_counts.items():
            _check_divides(num_ranks, what, total)
        recurrent = dataclasses.replace(recurrent, shape=recurrent.shape.of_rank(num_ranks))
    experts = config.experts
    if experts is None or experts.are_beside or len(experts.layers) < config.num_layers:
        _check_divides(num_ranks, "inner width", config.intermediate_size)
    if experts is not None:
        _check_divides(num_ranks, "inner width of an expert", experts.intermediate_size)
        _check_divides(num_ranks, "inner width of the shared expert", experts.shared_size)
        sizes = experts.intermediate_size // num_ranks, experts.shared_size // num_ranks
        experts = dataclasses.replace(experts, intermediate_size=sizes[0], shared_size=sizes[1])
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=len(split.of_kv_heads(config.num_kv_heads)),
        layer_heads=tuple((len(split.of_kv_heads(heads)), size) for heads, size in config.layer_heads),
        intermediate_size=config.intermediate_size // num_ranks,
        experts=experts,
        recurrent=recurrent,
    )


def require_one_rank(model_type: object, num_ranks: int) -> None:
    """Require one rank for a model that the transformers library computes. Raises UnsupportedModelError."""
    if num_ranks > 1:
        raise UnsupportedModelError("tensor parallelism of model type", model_type, "the native families")


def _check_divides(num_ranks: int, what: str, total: int) -> None:
    if total % num_ranks:
        raise _refused(num_ranks, f"divisors of the model's {what}, {total}")


def _refused(num_ranks: int, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError("tensor parallelism over ranks", num_ranks, supported)
