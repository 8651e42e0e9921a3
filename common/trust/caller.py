"""Caller: what a credential says of the program that calls, and the caller of the call that runs.

A caller is found once a call, by the gate. Handlers ask `calling()`; they read no metadata. Where a service has no gate, every
program that can connect is the operator of all tenants, as LOCAL says.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

ANY_TENANT = "*"
MAX_NAME_CHARS = 64


class Role(StrEnum):
    """What a caller is for; roles.py says which calls each role may make."""

    ENGINE = "engine"
    CLIENT = "client"
    READER = "reader"
    OPERATOR = "operator"


class ForeignTenant(Exception):
    """The caller named a tenant that its credential does not allow."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A program that calls. tenant: the one that it acts for, or ANY_TENANT."""

    name: str
    tenant: str
    role: Role

    @property
    def is_for_all(self) -> bool:
        """It may act for every tenant."""
        return self.tenant == ANY_TENANT

    def owns(self, tenant: str) -> bool:
        """Whether what belongs to the tenant may be shown to this caller."""
        return self.tenant in (ANY_TENANT, tenant)


LOCAL = Caller("local", ANY_TENANT, Role.OPERATOR)
_caller: ContextVar[Caller] = ContextVar("caller", default=LOCAL)
_on_foreign: ContextVar[Callable[[], None] | None] = ContextVar("on_foreign", default=None)
_is_known: ContextVar[Callable[[], bool] | None] = ContextVar("is_known", default=None)


def calling() -> Caller:
    """The caller of the call that runs."""
    return _caller.get()


def note_caller(
    caller: Caller, on_foreign: Callable[[], None] | None = None, is_known: Callable[[], bool] | None = None
) -> None:
    """The call that runs in this context comes from this caller.

    on_foreign: called where it names a tenant that is not its. is_known: whether its credential still stands for this caller.
    """
    _caller.set(caller)
    _on_foreign.set(on_foreign)
    _is_known.set(is_known)


def is_still_known() -> bool:
    """Whether the credential of the running call would be let in now: for calls that bring one request after the other."""
    is_known = _is_known.get()
    return is_known is None or is_known()


def calling_tenant(named: str) -> str:
    """The tenant that the running call is for, where its request names one, or none. Raises ForeignTenant."""
    caller = _caller.get()
    if caller.tenant == ANY_TENANT or named == caller.tenant:
        return named
    if not named:
        return caller.tenant
    raise foreign_tenant()


def require_all_tenants() -> None:
    """The running call is about the tenants together. Raises ForeignTenant where its caller is for one of them."""
    if not _caller.get().is_for_all:
        raise foreign_tenant()


def foreign_tenant() -> ForeignTenant:
    """The refusal of the running call, counted."""
    if (note := _on_foreign.get()) is not None:
        note()
    return ForeignTenant()
