"""What a caller may see and end: the requests that came with credentials of its tenant.

A request of a caller for one tenant is known by an id that begins with a name of that tenant. So two tenants may use one id,
neither learns of the other's, and what belongs to another tenant looks as if it did not exist. The name is a digest, because
ids are logged and tenants are not. A caller for all tenants names ids as they are known.
"""

import hashlib

from kvkeeper.common.trust import caller

from ..values.errors import TenantNotAllowed

_MAX_ID_CHARS = 64  # of the protocol: an engine that takes a request over gets its id as it is known here
_NAME_CHARS = 16


def known_id(request_id: str) -> str:
    """The id under which a request of the caller is known. Idempotent."""
    prefix = _prefix()
    if request_id.startswith(prefix):
        return request_id
    if len(prefix) + len(request_id) > _MAX_ID_CHARS:
        digest = hashlib.sha256(request_id.encode()).hexdigest()
        return f"{prefix}~{digest[: _MAX_ID_CHARS - len(prefix) - 1]}"
    return prefix + request_id


def shown_id(known: str) -> str:
    """The id of a request as its caller gave it, or was given it."""
    return known.removeprefix(_prefix())


def is_own(known: str) -> bool:
    """Whether the caller may see the request that is known by this id."""
    return known.startswith(_prefix())


def own_tenant(named: str) -> str:
    """The tenant that a call is for. Raises TenantNotAllowed."""
    return caller.calling_tenant(TenantNotAllowed, named)


def require_all_tenants() -> None:
    """The call is about the requests of all tenants. Raises TenantNotAllowed."""
    caller.require_all_tenants(TenantNotAllowed)


def _prefix() -> str:
    calling = caller.calling()
    return "" if calling.is_for_all else hashlib.sha256(calling.tenant.encode()).hexdigest()[:_NAME_CHARS] + "/"
