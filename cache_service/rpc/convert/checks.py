"""Bounds of single fields, and values that many requests carry: scopes, sequence ids, victim policies, eviction targets."""

import re
from typing import Protocol

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ...core.values.errors import InvalidField
from ...core.values.scopes import MOST_TENANT_CHARS, make_scope
from ...core.values.types import MAX_ID, SequenceId
from ..ownership import own_tenant

MAX_INT32 = 2**31 - 1
MAX_SALT = 256  # characters


class Scoped(Protocol):
    """A message that names a tenant with an adapter and a salt."""

    tenant: str
    adapter: str
    cache_salt: str


def check_range(field: str, value: float, low: int, high: int) -> None:
    """Raises InvalidField; its limit is the bound that was passed."""
    if not low <= value <= high:
        raise InvalidField(f"{field} is {low} to {high}", field=field, limit=low if value < low else high)


def check_text(field: str, value: str, longest: int, shortest: int = 0) -> None:
    """Raises InvalidField."""
    if not shortest <= len(value) <= longest:
        raise InvalidField(f"{field} has {shortest} to {longest} characters", field=field, limit=longest)


def tenant(value: str) -> str:
    """The tenant that the call is about: the one that it names, or its credential's. Raises InvalidField, TenantNotAllowed."""
    check_text("tenant", value, MOST_TENANT_CHARS)
    return own_tenant(value)


def scope(request: Scoped) -> str:
    """For whom, and with which adapter and salt, the call is. Raises InvalidField, TenantNotAllowed."""
    if request.adapter and re.fullmatch("[0-9a-f]{64}", request.adapter) is None:
        raise InvalidField("adapter is 64 lower-case hex digits, or empty", field="adapter", limit=64)
    if len(request.cache_salt) > MAX_SALT or not request.cache_salt.isprintable():
        raise InvalidField(f"cache_salt has up to {MAX_SALT} printable characters", field="cache_salt", limit=MAX_SALT)
    return make_scope(tenant(request.tenant), request.adapter, request.cache_salt)


def sequence_id(value: int, field: str = "sequence_id") -> SequenceId:
    """Raises InvalidField."""
    check_range(field, value, 1, MAX_ID)
    return SequenceId(value)


def victim_policy(number: int) -> str:
    """The policy's name. Raises InvalidField."""
    if number not in pb.VictimPolicy.values():
        raise InvalidField("policy is one of VictimPolicy", field="policy", limit=max(pb.VictimPolicy.values()))
    return pb.VictimPolicy.Name(number or pb.VICTIM_POLICY_PRIORITY).removeprefix("VICTIM_POLICY_").lower()


def check_one_target(request: pb.EvictBlocksRequest | pb.SelectVictimsRequest) -> None:
    """At most one of the fields that say how much is to come free. Raises InvalidField."""
    names = ("num_free_blocks", "num_blocks") if isinstance(request, pb.EvictBlocksRequest) else ("num_blocks",)
    for name in names:
        check_range(name, getattr(request, name), 0, MAX_INT32)
    if request.HasField("max_utilization"):
        check_range("max_utilization", request.max_utilization, 0, 1)
    if sum(bool(getattr(request, name)) for name in names) + request.HasField("max_utilization") > 1:
        raise InvalidField(f"give at most one of {', '.join(names)} and max_utilization", field=names[-1])
