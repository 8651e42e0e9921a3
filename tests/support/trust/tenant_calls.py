"""Tenants of a cache service that asks for tokens: each with a credential for itself alone, and a session of its own."""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.common.trust.caller import Caller, Role
from tests.support.trust.guarded_server import TokenFile, bearer
from tests.support.worlds.cache_api import DEADLINE, SPEC, Api, serving


class TenantCalls:
    """ids: of its session, which are fields of calls on it."""

    def __init__(self, api: Api, token: str) -> None:
        self.api, self.metadata = api, bearer(token)
        self.ids: dict[str, Any] = {}

    async def open(self, spec: pb.KvSpec) -> None:
        opened = await self.call("OpenSession", spec=spec, ttl_ms=3_600_000)
        self.ids = {"session_id": opened.session_id, "epoch": opened.epoch}

    async def call(self, method: str, **fields: Any) -> Any:
        """A unary call. Fields go before those of its own session."""
        kind = getattr(pb, f"{method}Request")
        ids = {name: value for name, value in self.ids.items() if name in kind.DESCRIPTOR.fields_by_name}
        request = kind(**(ids | fields))
        return await getattr(self.api.stub, method)(request, timeout=DEADLINE, metadata=self.metadata)

    async def store(self, sequence_id: int, prompt: Sequence[int]) -> None:
        """Has a prompt cached; its sequence goes on."""
        await self.call("CreateSequence", sequence_id=sequence_id, token_ids=prompt)
        for method in ("ExtendSequence", "CommitSequence"):
            await self.call(method, sequence_id=sequence_id, num_tokens=len(prompt))


@asynccontextmanager
async def tenants_served(
    names: Sequence[str], spec: pb.KvSpec = SPEC, **settings: Any
) -> AsyncIterator[dict[str, TenantCalls]]:
    """The tenants by name. settings: of the service, see serving. The pool is audited at the end."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        tokens = TokenFile(Path(folder) / "tokens")
        shown = {name: tokens.add(Caller(name, name, Role.ENGINE)) for name in names}
        auditor = bearer(tokens.add(Caller("auditor", "*", Role.OPERATOR)))
        async with serving(auth_tokens=tokens.path, **settings) as api:
            tenants = {name: TenantCalls(api, token) for name, token in shown.items()}
            for tenant in tenants.values():
                await tenant.open(spec)
            yield tenants
            found = await api.stub.CheckInvariants(pb.CheckInvariantsRequest(), timeout=DEADLINE, metadata=auditor)
            assert not found.violations, list(found.violations)
