"""The scopes of worlds: a tenant, also with an adapter or a salt, and another tenant; and how a client names each."""

from kvkeeper.cache_service.core.values.scopes import make_scope

ADAPTER = "ad" * 32
SALT = "a salt of the tests"
_NAMES = (("", "", ""), ("other", ADAPTER, ""), ("", ADAPTER, ""), ("", "", SALT))
SCOPES = tuple(make_scope(*names) for names in _NAMES)
NAMES = dict(zip(SCOPES, _NAMES, strict=True))  # tenant, adapter and salt
