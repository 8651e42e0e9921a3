"""What sequences are created from: their token ids, checked before they leave, and NewSequence, one of several; root names."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.errors import KvkeeperError

TokenIds = Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence to create together with others; CacheSession.create_sequence says what each field means."""

    sequence_id: int
    token_ids: TokenIds
    max_tokens: int = 0
    tenant: str = ""
    priority: int = 0
    retention: pb.Retention | None = None
    start_number: int = 0
    reuse_hint: pb.ReuseHint = pb.REUSE_HINT_UNSPECIFIED
    retain_ms: int = 0
    adapter: str = ""
    cache_salt: str = ""

    def message(self) -> pb.NewSequence:
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "token_ids"}
        return pb.NewSequence(packed_token_ids=pack(self.token_ids), **fields)


Created = pb.CreateSequenceResponse | KvkeeperError  # what became of one of them


def pack(token_ids: TokenIds) -> bytes:
    """The ids as LE32. Raises TypeError and ValueError."""
    return _check(token_ids).astype("<i4", copy=False).tobytes()


def to_list(token_ids: TokenIds) -> list[int]:
    """The ids as a list. Raises TypeError and ValueError."""
    return _check(token_ids).tolist()


def _check(token_ids: TokenIds) -> npt.NDArray[Any]:
    """The ids as an integer array; a cast on the way to the wire must not turn a wrong id into a valid one."""
    array = np.asarray(token_ids)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError("token ids must be a one-dimensional sequence of integers")
    if array.min() < 0 or (array.dtype != np.int32 and array.max() >= 1 << 31):
        raise ValueError("token ids are 0 to 2^31 - 1")
    return array


def root_name(spec: pb.KvSpec, tenant: str = "", adapter: str = "", cache_salt: str = "") -> bytes:
    """What the events of a watch name as the parent of first blocks, see WatchEventsResponse.block_names."""
    scope = tenant
    if adapter or cache_salt:
        salt = sha256(cache_salt.encode()).hexdigest() if cache_salt else ""
        scope += f"\0{adapter:->64}\0{salt:->64}"
    return sha256(spec.SerializeToString(deterministic=True) + b"\0" + scope.encode()).digest()
