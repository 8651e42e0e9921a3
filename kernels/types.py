"""What wrappers, kernels and references of several files are given: columns of a step, as tensors.

Owns no checks and no arithmetic. Imports none of the ops, so that an op and its kernels need nothing of each other for a type.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .cpu.products import RowBlocks

if TYPE_CHECKING:
    from .gpu.decode_work import DecodeWork


Int64Array = npt.NDArray[np.int64]
STATE_CHUNK = 64  # tokens that a recurrence takes at a time


@dataclass(frozen=True, slots=True)
class SequenceQueries:
    """One sequence's queries, first <= row < last, and the keys that they see together.

    Attributes:
        seq: its row of the block tables.
        positions: int64 [T], of the keys.
        mask: [Q, T], 0 or -inf, the query's dtype; None: plainly causal, Q == T, in one call, or one query that sees all.
        sinks: bool [Q, sinks], True for first keys that are sinks that a query's window has left; None: none.
    """

    seq: int
    first: int
    last: int
    positions: Int64Array
    mask: torch.Tensor | None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """The tables of a step's rows, checked once for all layers; made by plan_rows.

    Attributes:
        block_tables: int32 [S, max_blocks] of stored blocks.
        tail_tables: int32 [S, max_blocks] of pages, 0 where there is none; None: there is no tail.
        seq_lens: int32 [S].
        query_start_loc: int32 [S + 1]; None: each row has one query.
        lens, locs: seq_lens and where each row's queries start, as numbers; None on a device.
        works: by window the work list of decode on a device, once a layer has made it.
        gathers: by window what each sequence's queries see, on a CPU, once a layer has asked for it.
    """

    block_tables: torch.Tensor
    tail_tables: torch.Tensor | None
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor | None
    lens: Int64Array | None = None
    locs: Int64Array | None = None
    works: "dict[int | None, DecodeWork | None]" = field(default_factory=dict)
    gathers: dict[int | None, tuple[SequenceQueries, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QuantisedSlots:
    """Where a step's tokens go, the same for all layers; made by plan_slots.

    Attributes:
        stored: int64 [T], slots of stored blocks; negative: not written. No slot twice.
        tail: int64 [T], slots of the tail's pages, likewise; None: there is no tail.
    """

    stored: torch.Tensor
    tail: torch.Tensor | None


class CountedTensors(NamedTuple):
    """What is counted of R rows, and how they are penalised.

    Attributes:
        slots: int64 [R], each row's counts. Rows that count a token have slots of their own.
        tokens: int64 [R], what is counted, in the vocabulary.
        addends: int64 [R], ONE_MORE, or 0 where nothing is counted.
        penalties: float64 [3, R], repetition, frequency and presence; 1, 0 and 0 change nothing. Values of float32.
    """

    slots: torch.Tensor
    tokens: torch.Tensor
    addends: torch.Tensor
    penalties: torch.Tensor


class ScanRule(NamedTuple):
    """What Mamba 2 (arXiv 2405.21060) has otherwise: a token adds to what a head holds under its key, and corrects nothing.

    Attributes:
        conv_bias: [C], as mixed.
        skip: float32 [Hv], how much of a token's values is in its outputs beside what its query reads.
        least, most: bounds of a token's step, by which it both forgets and adds.
    """

    conv_bias: torch.Tensor
    skip: torch.Tensor
    least: float
    most: float


class ChannelRule(NamedTuple):
    """What Kimi Delta Attention (arXiv 2510.26692) has otherwise: each dimension of a head's keys forgets by itself.

    Attributes:
        gates: [T, Hv Dk], as mixed, row t at a stride: how much each of them forgets.
        least: of the logarithm of what a token leaves, below 0; it is this times the sigmoid of exp(decay_log) times the sum of
            gate and bias. None: there is none, and it is as that of a whole head.
    """

    gates: torch.Tensor
    least: float | None


class DeltaInputs(NamedTuple):
    """What the tokens of a step bring to a gated delta net, and its weights. C is 2 Hk Dk + Hv Dv.

    Attributes:
        mixed: [T, C], queries, keys and values before the convolution, row t at a stride.
        gates: [T, 2 Hv], how much each head corrects, and how much it forgets; with `scan` [T, Hv], of its steps; with
            `channels` [T, Hv], how much it corrects.
        conv: [C, kernel], as mixed.
        decay_bias, decay_log: float32 [Hv]; a head forgets at exp(decay_log) times the softplus of its gate and the bias. With
            `channels` the bias is [Hv Dk].
        scan: of Mamba 2, where queries and keys have the length that they have; None: of a gated delta net.
        channels: of a gated delta net whose dimensions forget one by one, where Hk is Hv; None: heads forget.
    """

    mixed: torch.Tensor
    gates: torch.Tensor
    conv: torch.Tensor
    decay_bias: torch.Tensor
    decay_log: torch.Tensor
    scan: ScanRule | None = None
    channels: ChannelRule | None = None


class DeltaState(NamedTuple):
    """What a gated delta net knows of the sequences, in pages: those of an arena, a stride apart.

    Attributes:
        memory: float32 [P, Hv, Dk, Dv].
        conv: [P, kernel - 1, C], the convolution's last inputs.
    """

    memory: torch.Tensor
    conv: torch.Tensor


class ConvInputs(NamedTuple):
    """What the tokens of a step bring to a gated short convolution of C channels, and its weights.

    Attributes:
        mixed: [T, 3 C]: factors of what goes in, factors of what comes out, and what goes in.
        conv: [C, kernel], as mixed. bias: [C], or None.
    """

    mixed: torch.Tensor
    conv: torch.Tensor
    bias: torch.Tensor | None


class StateRows(NamedTuple):
    """Rows of one token. A page that is 0 is read as the state before the first token, and not written.

    Attributes:
        tokens: int64 [S], of the step; None: all, in order.
        reads, writes: int64 [S], pages. A page that is written is in no other row.
    """

    tokens: torch.Tensor | None
    reads: torch.Tensor
    writes: torch.Tensor


class StateChunks(NamedTuple):
    """Rows of several tokens, in chunks of at most STATE_CHUNK of them, one behind the other. Pages as in StateRows.

    Attributes:
        reads: int64 [S], pages.
        starts: int64 [S + 1], where each row's chunks begin.
        rows, firsts, lens: int64 [N], of each chunk its row, its first token and how many it has.
        writes: int64 [N], pages of the states behind each chunk.
    """

    reads: torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    firsts: torch.Tensor
    lens: torch.Tensor
    writes: torch.Tensor


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight [out_features, in_features] as linear takes it.

    Attributes:
        bias: [out_features] or None.
        packed: whether `data` is in oneDNN's layout, and opaque.
        blocks: how packed data lies in memory, where that is known.
    """

    data: torch.Tensor
    bias: torch.Tensor | None = None
    packed: bool = False
    blocks: RowBlocks | None = None
