"""What every field of every request may hold, and values around that: the table behind the boundary matrix.

Owns one Bound per field, by the message that declares it. A Bound offers values beside, at and beyond its edges, says which of
them are within, and with what reasons the others are refused. Ranges are those that the proto's comments document, for the
small world of tests/api/test_field_bounds.py; within its range a value may still be refused, for example for want of blocks.
"""

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.values.types import MAX_ID
from tests.support.worlds.cache_api import le32, le64

INVALID = ("INVALID_FIELD",)
MAX_INT32 = 2**31 - 1
NUM_KNOWN, NUM_COMMITTED, NUM_RESERVED = 8, 6, 8  # tokens of sequence 1 of the world
LIMIT_TOKENS = 1360  # of a sequence there


class Bound:
    """What one field may hold. `values` are set on the field, below, at and beyond its range."""

    reasons: tuple[str, ...] = INVALID

    def values(self, field: Any) -> Iterable[Any]:
        raise NotImplementedError

    def holds(self, value: Any) -> bool:
        raise NotImplementedError


@dataclass(frozen=True)
class Number(Bound):
    """low to high; also 0 where that stands for a default."""

    low: int
    high: int = MAX_INT32
    zero: bool = False
    reasons: tuple[str, ...] = INVALID

    def values(self, field: Any) -> Iterable[int]:
        bits = {field.TYPE_INT32: 31, field.TYPE_INT64: 63}.get(field.type, 32)
        least = 0 if field.type == field.TYPE_UINT32 else -(2**bits)
        near = {self.low - 1, self.low, self.high, self.high + 1, 0, 1, -1, least, 2**bits - 1}
        return sorted(value for value in near if least <= value < 2**bits)

    def holds(self, value: int) -> bool:
        return self.low <= value <= self.high or (self.zero and value == 0)


@dataclass(frozen=True)
class Text(Bound):
    longest: int
    shortest: int = 0
    reasons: tuple[str, ...] = INVALID
    printable: bool = False

    def values(self, field: Any) -> Iterable[str]:
        return ["", "a", "a" * self.longest, "é" * self.longest, "a" * (self.longest + 1), "x" * 5000, "\0"]

    def holds(self, value: str) -> bool:
        return self.shortest <= len(value) <= self.longest and (value.isprintable() or not self.printable)


@dataclass(frozen=True)
class Digest(Bound):
    """Of 64 hex digits, or empty."""

    reasons: tuple[str, ...] = INVALID

    def values(self, field: Any) -> Iterable[str]:
        return ["", "0" * 64, "0" * 63, "0" * 65, "F" * 64, "x" * 64, "é" * 64, "x" * 5000, "\0"]

    def holds(self, value: str) -> bool:
        return len(value) in (0, 64) and set(value) <= set("0123456789abcdef")


@dataclass(frozen=True)
class Only(Bound):
    """A field that names something of the world: each of `others` is refused."""

    others: tuple[Any, ...]
    reasons: tuple[str, ...]

    def values(self, field: Any) -> Iterable[Any]:
        return self.others

    def holds(self, value: Any) -> bool:
        return False


@dataclass(frozen=True)
class OneOf(Bound):
    """An enum, or a flag; every number that means nothing is refused."""

    known: tuple[int, ...]

    def values(self, field: Any) -> Iterable[int]:
        return (False, True) if field.enum_type is None else {*self.known, 0, -1, 99, MAX_INT32, -(2**31)}

    def holds(self, value: int) -> bool:
        return value in self.known


@dataclass(frozen=True)
class Ratio(Bound):
    """0 to 1."""

    def values(self, field: Any) -> Iterable[float]:
        return [0.0, 1.0, -0.0, 5e-324, -5e-324, math.nextafter(1, 2), 1e308, math.nan, math.inf, -math.inf]

    def holds(self, value: float) -> bool:
        return 0 <= value <= 1


@dataclass(frozen=True)
class Many(Bound):
    """A repeated field: least to most items, each within `item`. Most None is the message's own limit."""

    item: Number
    least: int = 0
    most: int | None = None
    reasons: tuple[str, ...] = INVALID

    def values(self, field: Any) -> Iterable[list[int]]:
        longer = [] if self.most is None else [[self.item.low] * (self.most + 1)]
        return [[], *([value] for value in self.item.values(field)), [self.item.low] * 5000, *longer]

    def holds(self, value: list[int]) -> bool:
        return self.least <= len(value) <= (self.most or len(value)) and all(map(self.item.holds, value))


@dataclass(frozen=True)
class Column(Bound):
    """Little-endian items of `width` bytes, one of them in the world's request; `any_count`: it fixes the length itself."""

    width: int
    item: Number
    any_count: bool = False

    @property
    def reasons(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*INVALID, *self.item.reasons)

    def values(self, field: Any) -> Iterable[bytes]:
        bits = 8 * self.width - 1
        near = {self.item.low - 1, self.item.low, self.item.high, self.item.high + 1, 0, 1, -1, -(2**bits), 2**bits - 1}
        for value in sorted(value for value in near if -(2**bits) <= value < 2**bits):
            yield le32(value) if self.width == 4 else le64(value)
        for size in (1, self.width - 1, self.width + 1, 2 * self.width, 3001 * self.width):
            yield bytes(size)

    def holds(self, value: bytes) -> bool:
        if self.any_count and value and len(value) % self.width == 0:
            items = [value[at : at + self.width] for at in range(0, len(value), self.width)]
            return all(self.item.holds(int.from_bytes(item, "little", signed=True)) for item in items)
        return len(value) == self.width and self.item.holds(int.from_bytes(value, "little", signed=True))


@dataclass(frozen=True)
class Bytes(Bound):
    """Blobs of one valid size or of none."""

    size: int

    def values(self, field: Any) -> Iterable[bytes]:
        return [b"", b"\0", bytes(self.size - 1), bytes(self.size), bytes(self.size + 1), b"\xff" * 200_000]

    def holds(self, value: bytes) -> bool:
        return len(value) == self.size


class Floats(Bytes):
    """The same, of finite numbers."""

    def values(self, field: Any) -> Iterable[bytes]:
        yield from super().values(field)
        for number in (math.nan, math.inf, -math.inf, 1e38):
            yield struct.pack("<f", number)

    def holds(self, value: bytes) -> bool:
        return super().holds(value) and math.isfinite(struct.unpack("<f", value)[0])


@dataclass(frozen=True)
class Part(Bound):
    """A message inside: may be left out, or may not; its own fields have their own bounds."""

    optional: bool

    def values(self, field: Any) -> Iterable[None]:
        return [None]

    def holds(self, value: None) -> bool:
        return self.optional


UNKNOWN = ("UNKNOWN_SEQUENCE",)
FLAG = OneOf((0, 1))
ID = Number(1, MAX_ID, reasons=(*INVALID, *UNKNOWN))
TOKEN = Number(0, MAX_INT32)
IDS = Column(8, ID)
LENGTH = Column(4, Number(1))
NO_SESSION = ("UNKNOWN_SESSION", "STALE_EPOCH", "INVALID_FIELD")

# Fields that mean the same wherever they stand.
COMMON: dict[str, Bound] = {
    "session_id": Only(("", "x", "0" * 32, "x" * 5000, "é" * 32), NO_SESSION),
    "epoch": Only((0, 1, -1, 2**53, 2**63 - 1, -(2**63)), NO_SESSION),
    "sequence_id": ID,
    "tenant": Text(64),
    "adapter": Digest(),
    "cache_salt": Text(256, printable=True),
    "token_ids": Many(TOKEN, least=1, reasons=(*INVALID, "NEVER_FITS")),
    "retention": Part(optional=True),
}

BOUNDS: dict[str, Bound] = {
    "KvSpec.model_id": Text(256, shortest=1),
    "KvSpec.revision": Text(256),
    "KvSpec.num_layers": Number(1, 1024),
    "KvSpec.num_kv_heads": Number(1, 1024),
    "KvSpec.head_dim": Number(1, 4096),
    "KvSpec.kv_dtype": OneOf((1, 2, 3)),
    "KvSpec.block_size": Number(1, 1024),
    "KvSpec.layout": OneOf((1,)),  # of a spec with elements, as all of these
    "KvSpec.page": Part(optional=True),
    "KvSpec.groups": Part(optional=True),
    "LayerGroup.kind": Only((0, 1, 2, 5, 99, -1), INVALID),  # the layout is another
    "LayerGroup.layer_idx": Only(([], [0], [0, 1], [-1], [2**31 - 1]), INVALID),
    "LayerGroup.window_tokens": Only((0, 1, -1, 2**31 - 1), INVALID),
    "LayerGroup.state_bytes": Only((0, 1, -1, 2**63 - 1), INVALID),
    "LayerGroup.checkpoint_blocks": Only((0, 1, -1, 2**31 - 1), INVALID),
    "LayerGroup.num_kv_heads": Only((0, 1, -1, 1025, 2**31 - 1), INVALID),
    "LayerGroup.head_dim": Only((0, 1, -1, 4097, 2**31 - 1), INVALID),
    "LayerGroup.kv_dtype": Only((0, 1, 6, 99, -1), INVALID),
    "LayerGroup.page": Part(optional=True),
    "PageLayout.page_bytes": Only((0, 1, 15, 16, 2**30, 2**63 - 1, -(2**63)), INVALID),
    "PageLayout.digest": Only(("", "0" * 64, "x" * 64, "0" * 63, "0" * 5000), INVALID),
    "KvSpec.sliding_window": Number(0),
    "KvSpec.rope_parameters": Text(4096),
    "KvSpec.compute_dtype": Text(32),
    "KvSpec.tensor_parallel_size": Number(0, 64),
    "Retention.num_sink_tokens": Number(0),
    "Retention.num_window_tokens": Number(1),
    "CheckAdmissionRequest.token_ids": Many(TOKEN),
    "CheckAdmissionRequest.num_prompt_tokens": Number(1),
    "CheckAdmissionRequest.num_new_tokens": Number(0),
    "OpenSessionRequest.spec": Part(optional=False),
    "OpenSessionRequest.executor": OneOf((0, 1, 2)),
    "OpenSessionRequest.ttl_ms": Number(500, 3_600_000, zero=True),
    "OpenSessionRequest.client_name": Text(256),
    "OpenSessionRequest.protocol_version": Number(0, MAX_INT32),
    "OpenSessionRequest.read_only_memory": FLAG,
    "OpenSessionRequest.packs_host_blocks": FLAG,
    "RenewSessionRequest.completed_step_id": Number(0, 2),
    "RenewSessionRequest.completed_transfer_ids": Column(8, Number(1, 0)),
    "RenewSessionRequest.failed_transfer_ids": Column(8, Number(1, 0)),
    "CloseSessionRequest.drained": FLAG,
    "StepRequest.step_id": Only((0, 1, 4, -1, 2**63 - 1, -(2**63)), ("STEP_GAP", "STEP_CONFLICT")),
    "StepRequest.completed_step_id": Number(2, 2),
    "StepRequest.completed_transfer_ids": Column(8, Number(1, 0)),
    "StepRequest.failed_transfer_ids": Column(8, Number(1, 0)),
    "StepRequest.traceparent": Text(64),
    "StepRequest.commit_sequence_ids": IDS,
    "StepRequest.commit_num_tokens": Column(4, Number(NUM_COMMITTED, NUM_RESERVED)),
    "StepRequest.commit_num_new_tokens": Column(4, Number(1, 1)),
    "StepRequest.commit_token_ids": Column(4, TOKEN),
    "StepRequest.fork_parent_ids": IDS,
    "StepRequest.fork_child_ids": IDS,
    "StepRequest.fork_num_tokens": Column(4, Number(1, NUM_COMMITTED)),
    "StepRequest.truncate_sequence_ids": IDS,
    "StepRequest.truncate_num_tokens": LENGTH,
    "StepRequest.release_sequence_ids": IDS,
    "StepRequest.swap_out_sequence_ids": IDS,
    "StepRequest.swap_in_sequence_ids": IDS,
    "StepRequest.start_sequence_ids": IDS,
    "StepRequest.start_max_new_tokens": LENGTH,
    "StepRequest.start_max_hit_tokens": Column(4, Number(0)),
    "StepRequest.start_may_wait": Column(4, Number(0, 1)),
    "StepRequest.reserve_sequence_ids": IDS,
    "StepRequest.reserve_min_tokens": Column(4, Number(1, NUM_RESERVED)),
    "StepRequest.reserve_max_tokens": Column(4, Number(NUM_RESERVED, LIMIT_TOKENS)),
    "CreateSequenceRequest.packed_token_ids": Column(4, TOKEN, any_count=True),
    "CreateSequenceRequest.max_tokens": Number(2, LIMIT_TOKENS, zero=True, reasons=(*INVALID, "NEVER_FITS")),
    "CreateSequenceRequest.priority": Number(-1000, 1000),
    "CreateSequenceRequest.start_number": Number(0, MAX_ID),
    "CreateSequenceRequest.reuse_hint": OneOf(tuple(pb.ReuseHint.values())),
    "CreateSequenceRequest.retain_ms": Number(0, 3_600_000),
    "CreateSequencesRequest.sequences": Part(optional=False),
    "NewSequence.packed_token_ids": Column(4, TOKEN, any_count=True),
    "NewSequence.max_tokens": Number(2, LIMIT_TOKENS, zero=True, reasons=(*INVALID, "NEVER_FITS")),
    "NewSequence.priority": Number(-1000, 1000),
    "NewSequence.start_number": Number(0, MAX_ID),
    "NewSequence.reuse_hint": OneOf(tuple(pb.ReuseHint.values())),
    "NewSequence.retain_ms": Number(0, 3_600_000),
    "ExtendSequenceRequest.num_tokens": Number(1, LIMIT_TOKENS),
    "ExtendSequenceRequest.skip_look_up": FLAG,
    "CommitSequenceRequest.num_tokens": Number(0, NUM_RESERVED),
    "CommitSequenceRequest.first_token_idx": Number(0, NUM_KNOWN),
    "CommitSequenceRequest.token_ids": Many(TOKEN),
    "ForkSequenceRequest.parent_id": ID,
    "ForkSequenceRequest.child_id": ID,
    "ForkSequenceRequest.num_tokens": Number(0, NUM_COMMITTED),
    "TruncateSequenceRequest.num_tokens": Number(1),
    "UpdateSequenceRequest.priority": Number(-1000, 1000),
    "UpdateSequenceRequest.reuse_hint": OneOf(tuple(pb.ReuseHint.values())),
    "GetSequenceRequest.include_tokens": FLAG,
    "WatchEventsRequest.include_token_ids": FLAG,
    "ListSequencesRequest.session_id": Only(("x", "0" * 32, "x" * 5000), NO_SESSION),
    "ListSequencesRequest.page_size": Number(0, 1000),
    "ListSequencesRequest.page_token": Only(("?", "YWJj", "x" * 5000), INVALID),
    "TakeSequenceRequest.offer": Only((b"", bytes(15), bytes(17)), INVALID),
    "TakeSequenceRequest.sequence_id": ID,
    "PinPrefixRequest.ttl_ms": Number(1, 86_400_000),
    "HintPrefixRequest.hints": Part(optional=False),
    "PrefixHint.token_ids": Many(TOKEN, least=1),
    "PrefixHint.reuse_hint": OneOf(tuple(pb.ReuseHint.values())),
    "PrefixHint.retain_ms": Number(0, 3_600_000),
    "PrefixHint.prefetch": FLAG,
    "UnpinPrefixRequest.pin_id": Only(("", "x", "x" * 5000), (*INVALID, "UNKNOWN_PIN")),
    "StoreLogitsRequest.logits": Floats(4),
    "StoreLogitsRequest.num_tokens": Number(1, NUM_COMMITTED),
    "GetBlockRequest.block_id": Number(1, 340, reasons=(*INVALID, "UNKNOWN_BLOCK")),
    "SelectVictimsRequest.policy": OneOf(tuple(pb.VictimPolicy.values())),
    "SelectVictimsRequest.num_blocks": Number(0),
    "SelectVictimsRequest.max_utilization": Ratio(),
    "EvictBlocksRequest.num_free_blocks": Number(0),
    "EvictBlocksRequest.num_blocks": Number(0),
    "EvictBlocksRequest.max_utilization": Ratio(),
    "ReadKvRequest.first_token_idx": Number(0, NUM_COMMITTED),
    "ReadKvRequest.num_tokens": Number(0, NUM_COMMITTED),
    "ReadKvRequest.layer_idx": Many(Number(0, 1), most=2),
    "ReadKvRequest.kv_dtype": OneOf((0, 1, 2, 3)),
    "WriteKvRequest.layer_idx": Number(0, 1),
    "WriteKvRequest.first_token_idx": Number(NUM_COMMITTED, NUM_RESERVED - 1),
    "WriteKvRequest.key": Bytes(12),
    "WriteKvRequest.value": Bytes(12),
    "WriteKvRequest.kv_dtype": OneOf((0, 1, 2, 3)),
}
