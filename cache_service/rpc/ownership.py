"""What a caller may see and change: sessions of its tenant, and sequences and prefixes of it.

A session belongs to the tenant of the caller that opened it. What belongs to another tenant is treated as if it did not exist,
with the same words. A caller that only looks may do so in the sessions of callers for all tenants, and finds the sequences of
its own tenant there. Of a caller for all tenants nothing is asked but its role. Looked at once a call, or once a stream of
steps.
"""

from typing import Protocol

from kvkeeper.common.service.methods import peer
from kvkeeper.common.trust import caller
from kvkeeper.common.trust.caller import ANY_TENANT

from ..core.values.errors import TenantNotAllowed
from ..core.values.types import SequenceId
from ..runtime.live_session import LiveSession
from ..runtime.session_manager import SessionManager


class SessionRequest(Protocol):
    """A request that names its session."""

    @property
    def session_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...


def counted_caller(client_name: str) -> str:
    """The caller that a session counts for, which leaves some sessions and sequences to others.

    A tenant, else a connection. gRPC does not distinguish connections of a Unix socket, so there it is what the client calls
    itself.
    """
    tenant, connection = caller.calling().tenant, peer.get()
    if tenant != ANY_TENANT:
        return f"tenant {tenant}"
    return f"{connection}{client_name}" if connection.startswith("unix:") else connection


def own_session(manager: SessionManager, request: SessionRequest) -> LiveSession:
    """The session that the call changes. Raises as SessionManager.require does, also for one of another tenant."""
    check_own(manager, request)
    return manager.require(request.session_id, request.epoch)


def readable_session(manager: SessionManager, request: SessionRequest) -> LiveSession:
    """The session that the call looks at; it may be one of a caller for all tenants. Raises as own_session does."""
    calling = caller.calling()
    if calling.tenant != ANY_TENANT and manager.find_tenant(request.session_id) not in (calling.tenant, ANY_TENANT):
        manager.refuse_as_unknown(request.epoch)
    return manager.require(request.session_id, request.epoch)


def check_own(manager: SessionManager, request: SessionRequest) -> None:
    """Raises for a session of another tenant what an unknown one gets."""
    calling = caller.calling()
    if calling.tenant != ANY_TENANT and manager.find_tenant(request.session_id) != calling.tenant:
        manager.refuse_as_unknown(request.epoch)


def check_sequence(live: LiveSession, sequence_id: SequenceId) -> None:
    """Raises UnknownSequence for a sequence of another tenant in a session of a caller for all."""
    calling = caller.calling()
    if calling.tenant != ANY_TENANT:
        live.pool.manager.queries.check_tenant(live.core.id, sequence_id, calling.tenant)


def own_tenant(named: str) -> str:
    """The tenant that a call is for. Raises TenantNotAllowed."""
    return caller.calling_tenant(TenantNotAllowed, named)


def require_all_tenants() -> None:
    """The call is about what all tenants have in the pool. Raises TenantNotAllowed."""
    caller.require_all_tenants(TenantNotAllowed)
