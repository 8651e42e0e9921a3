"""How each of the cache service's errors goes on the wire: its code, and when the same call may succeed."""

import grpc
from google.protobuf import duration_pb2

from kvkeeper.common.service.status import Refusals

from ..core.values.errors import BrokenInvariant, CacheError, HostExhausted, InvalidField, NotImplementedYet

_RETRY_DELAY = duration_pb2.Duration(nanos=200_000_000)

_ERRORS = CacheError.__subclasses__()

REFUSALS = Refusals(
    base=CacheError,
    invalid_field=InvalidField,
    not_implemented=NotImplementedYet,
    broken_invariant=BrokenInvariant,
    host_exhausted=HostExhausted,
    codes={error.reason: grpc.StatusCode[error.code] for error in _ERRORS},
    retry_delays={error.reason: _RETRY_DELAY for error in _ERRORS if error.code == "UNAVAILABLE"},
)
