"""Both services on TCP behind TLS and tokens, and the credentials of callers of each role."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.server import RunningServer as RunningCache
from kvkeeper.cache_service.server import start_server as start_cache
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, CallOptions, Credentials
from kvkeeper.common.trust.caller import Caller, Role
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.server import RunningServer as RunningEngine
from kvkeeper.engine_service.server import start_server as start_engine
from tests.support.processes.service_pair import num_fronts
from tests.support.trust.certificates import SERVER_NAMES, Certificate, authority, issue
from tests.support.trust.guarded_server import TokenFile

TENANTS = ("*", "a", "b", "")


@dataclass
class Trusting:
    """A folder with an authority and a file of tokens, and services that go by them."""

    folder: Path
    stack: AsyncExitStack
    ca: Certificate = field(default_factory=authority)

    def __post_init__(self) -> None:
        self.tokens = TokenFile(self.folder / "tokens")
        self.ca_path = self.folder / "ca.pem"
        self.ca_path.write_bytes(self.ca.pem)
        self.cert, self.key = issue("service", self.ca, names=SERVER_NAMES).write(self.folder, "service")
        self._token_files: dict[tuple[Role, str], Path] = {}
        for role in Role:  # before a service reads the file
            for place, tenant in enumerate(TENANTS):
                path = self._token_files[role, tenant] = self.folder / f"token-{role}-{place}"
                path.touch(mode=0o600)
                path.write_text(self.tokens.add(Caller(f"{role}-{place}", tenant, role)) + "\n")
        self.cache: RunningCache

    def token_file(self, role: Role, tenant: str = "*") -> Path:
        return self._token_files[role, tenant]

    def credentials(self, role: Role, tenant: str = "*") -> Credentials:
        return Credentials(token_file=self.token_file(role, tenant), tls_ca=self.ca_path)

    def guarded(self) -> dict[str, Any]:
        """Settings of a service."""
        return {"tls_cert": self.cert, "tls_key": self.key, "auth_tokens": self.tokens.path}

    async def start_cache(self, **options: Any) -> RunningCache:
        options = {"listen": "127.0.0.1:0", "num_blocks": 64, "drain_timeout": 0.0, **self.guarded(), **options}
        self.cache = await start_cache(CacheConfig(runtime_dir=self.folder / "run", **options))
        self.stack.push_async_callback(self.cache.stop)
        return self.cache

    async def start_engine(self, **options: Any) -> RunningEngine:
        options = {
            "listen": "127.0.0.1:0",
            "model": HASH_TOY,
            "block_size": 4,
            "progress": False,
            "drain_timeout": 1.0,
            "fronts": num_fronts(),
            "cache_tls_ca": self.ca_path,
            "cache_token_file": self.token_file(Role.ENGINE),
            **self.guarded(),
            **options,
        }
        engine = await start_engine(EngineConfig(cache=self.cache.address, **options))
        self.stack.push_async_callback(engine.stop)
        return engine

    async def cache_client(self, credentials: Credentials) -> AsyncCacheClient:
        client = AsyncCacheClient(self.cache.address, CallOptions(retry_s=0), credentials)
        return await self.stack.enter_async_context(client)

    async def engine_client(self, engine: RunningEngine, credentials: Credentials, retry_s: float = 0) -> AsyncEngineClient:
        client = AsyncEngineClient(engine.address, CallOptions(retry_s=retry_s), credentials)
        return await self.stack.enter_async_context(client)


@asynccontextmanager
async def trusting(folder: Path) -> AsyncIterator[Trusting]:
    async with AsyncExitStack() as stack:
        yield Trusting(folder, stack)
