"""Configuration of the cache service: one frozen value, made here from flags over environment over defaults.

Owns every default, range and name; nothing else reads the command line or the environment. A wrong value is a ConfigError of
one line that names the flag. Does not look at the machine: whether memory or an address can be had is found out at start.
"""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvkeeper.service.config import (
    LOG_LEVELS,
    MAX_SOCKET_PATH_BYTES,
    ConfigError,
    ConfigSource,
    check_address,
    check_choice,
    check_metrics_address,
    check_range,
    check_size,
    check_trace_endpoint,
    flag,
    parse_switch,
)
from kvkeeper.service.sizes import parse_size

from .core.blocks.pressure import PressureGauge
from .core.eviction import POLICY_NAMES, make_policy
from .core.values.errors import InvalidField

MIB = 1 << 20
MAX_POOL_BLOCKS = 1 << 20  # bounds what the core's arrays may take, however small a block is
_MAX_RUNTIME_DIR_BYTES = MAX_SOCKET_PATH_BYTES - len("/attach-0123456789abcdef.sock")
_POOL_MEMORY = 256 * MIB
_MAX_TOKEN_SLOTS = 1 << 28  # of all sequences together: the core keeps their ids in one array
_MAX_TOKENS = 1 << 22  # of one
_LEAST_TOKENS = 4096  # that a sequence can have on a pool that holds fewer, when it gives blocks back on the way
_MOST_OF_A_TENANT = 0.5  # so that what one tenant has cached never keeps all others from theirs


def _default_runtime_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvkeeper" if base else Path(tempfile.gettempdir()) / f"kvkeeper-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Everything that is decided before the service starts. Raises ConfigError for a value out of its range."""

    listen: str = "127.0.0.1:7410"  # loopback host:port, or unix:/path
    runtime_dir: Path = field(default_factory=_default_runtime_dir)  # of the attach socket; made with mode 0700
    device: str = "cpu"  # where pools are: cpu, cuda or cuda:N
    pool_memory: int = _POOL_MEMORY  # bytes of each pool, reserved at start; without effect where num_blocks is given
    num_pools: int = 2
    keep_idle_pools: bool = False  # a pool that no session uses makes no room for another KV spec
    num_blocks: int | None = None  # blocks of each pool, null block included, reserved when its first session opens
    max_sequences: int = 256
    max_tokens_per_sequence: int | None = None  # None: what a pool holds, but no more than bounds the core's arrays
    max_sessions: int = 64
    eviction_policy: str = "adaptive"
    watermark: float = 0.01  # share of a pool kept free when admitting while something runs
    evict_above: float = 1.0  # share of a pool; cached blocks above it are evicted before they are needed
    pressure_levels: tuple[float, ...] = (0.6, 0.8, 0.95)  # where medium, high and critical begin
    prefix_caching: bool = True
    prefix_ttl: float | None = None  # seconds that a cached block lives without being used
    min_prefix_tokens: int = 0  # a shorter match is no hit
    max_cached_blocks: int | None = None  # blocks that are cached and held by nobody
    tenant_quota: float = 1.0  # share of a pool that a tenant may keep cached, at most half; 1 is no quota
    tenant_quotas: tuple[tuple[str, float], ...] = ()  # tenants with another one
    logits_memory: int = 0  # bytes of stored last-token logits of each pool; 0 stores none
    host_memory: int = 0  # bytes of the host tier of each pool, reserved with it; 0: there is none
    num_host_blocks: int = 0  # blocks of it instead, null block included
    metrics_listen: str = ""  # host:port of /metrics; empty: not served
    trace_endpoint: str = ""  # URL that spans are sent to; empty: none are
    reflection: bool = True
    drain_timeout: float = 3.0  # seconds that live sessions have to close once the service is asked to stop
    log_level: str = "info"

    def __post_init__(self) -> None:
        check_address("listen", self.listen)
        check_metrics_address(self.metrics_listen)
        check_trace_endpoint(self.trace_endpoint)
        if len(os.fsencode(self.runtime_dir)) > _MAX_RUNTIME_DIR_BYTES:
            raise ConfigError(f"--runtime-dir: a path of at most {_MAX_RUNTIME_DIR_BYTES} bytes, for the sockets in it")
        if re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device) is None:
            raise ConfigError(f"--device: cpu, cuda or cuda:N, not {self.device!r}")
        check_size("pool_memory", self.pool_memory, 64 << 10, 1 << 46)
        check_range("num_pools", self.num_pools, 1, 64)
        if self.num_blocks is not None:
            check_range("num_blocks", self.num_blocks, 2, MAX_POOL_BLOCKS)
        check_range("max_sequences", self.max_sequences, 1, 1 << 16)
        if self.max_tokens_per_sequence is not None:
            check_range("max_tokens_per_sequence", self.max_tokens_per_sequence, 1, _MAX_TOKENS)
            if self.max_sequences * self.max_tokens_per_sequence > _MAX_TOKEN_SLOTS:
                raise ConfigError(f"--max-sequences times --max-tokens-per-sequence is at most {_MAX_TOKEN_SLOTS}")
        if self.prefix_ttl is not None:
            check_range("prefix_ttl", self.prefix_ttl, 0.001, 30 * 86_400)
        check_range("min_prefix_tokens", self.min_prefix_tokens, 0, 1 << 22)
        if self.max_cached_blocks is not None:
            check_range("max_cached_blocks", self.max_cached_blocks, 0, MAX_POOL_BLOCKS)
        for name, share in (
            ("tenant_quota", self.tenant_quota),
            *(("tenant_quotas", share) for _, share in self.tenant_quotas),
        ):
            if not (0 <= share <= _MOST_OF_A_TENANT or share == 1):
                raise ConfigError(f"{flag(name)}: 0 to {_MOST_OF_A_TENANT}, or 1 for no quota, not {share}")
        check_size("logits_memory", self.logits_memory, 0, 1 << 40)
        check_size("host_memory", self.host_memory, 0, 1 << 46)
        if self.num_host_blocks:
            check_range("num_host_blocks", self.num_host_blocks, 2, MAX_POOL_BLOCKS)
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"--watermark: a share from 0 to below 1, not {self.watermark}")
        if not 0 < self.evict_above <= 1:
            raise ConfigError(f"--evict-above: a share above 0 and up to 1, not {self.evict_above}")
        try:
            PressureGauge(self.pressure_levels, 1)
        except InvalidField as error:
            raise ConfigError(f"--pressure-levels: {error}") from None
        check_range("max_sessions", self.max_sessions, 1, 4096)
        check_range("drain_timeout", self.drain_timeout, 0, 3600)
        check_choice("log_level", self.log_level, LOG_LEVELS)
        try:
            make_policy(self.eviction_policy, 2)
        except InvalidField as error:
            raise ConfigError(f"--eviction-policy: one of {error.metadata['limit']}, not {self.eviction_policy!r}") from None

    @property
    def most_tokens(self) -> int:
        """Tokens of a sequence, however large a pool is."""
        return self.max_tokens_per_sequence or min(_MAX_TOKENS, _MAX_TOKEN_SLOTS // self.max_sequences)

    def tokens_of_sequence(self, pool_tokens: int) -> int:
        """Most tokens of a sequence of a pool that holds so many. One that gives blocks back can have more than that."""
        return self.max_tokens_per_sequence or min(self.most_tokens, max(pool_tokens, _LEAST_TOKENS))


def parse_quotas(text: str) -> tuple[tuple[str, float], ...]:
    """Shares by tenant of "a=0.1,b=0.5". Raises ValueError."""
    quotas: dict[str, float] = {}
    for item in text.split(",") if text else ():
        tenant, equals, share = item.rpartition("=")
        if not equals or tenant in quotas or re.fullmatch(r"[\d.]{1,20}", share) is None:
            raise ValueError("shares by tenant, each once, such as a=0.1,b=0.5")
        quotas[tenant] = float(share)
    return tuple(quotas.items())


def parse_shares(text: str) -> tuple[float, ...]:
    """Shares of "0.6,0.8,0.95". Raises ValueError."""
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError:
        raise ValueError("three shares such as 0.6,0.8,0.95") from None


_PARSERS: dict[str, Any] = {
    "listen": str,
    "runtime_dir": Path,
    "device": str,
    "pool_memory": parse_size,
    "num_pools": int,
    "keep_idle_pools": parse_switch,
    "num_blocks": int,
    "max_sequences": int,
    "max_tokens_per_sequence": int,
    "max_sessions": int,
    "eviction_policy": str,
    "watermark": float,
    "evict_above": float,
    "pressure_levels": parse_shares,
    "prefix_caching": parse_switch,
    "prefix_ttl": float,
    "min_prefix_tokens": int,
    "max_cached_blocks": int,
    "tenant_quota": float,
    "tenant_quotas": parse_quotas,
    "logits_memory": parse_size,
    "host_memory": parse_size,
    "num_host_blocks": int,
    "metrics_listen": str,
    "trace_endpoint": str,
    "reflection": parse_switch,
    "drain_timeout": float,
    "log_level": str,
}

_HELP = {
    "listen": "loopback host:port, or unix:/path",
    "device": "where pools are: cpu, cuda or cuda:N; engines on it need the same device",
    "runtime_dir": "folder of the attach socket (default: $XDG_RUNTIME_DIR/kvkeeper, or a private temporary one)",
    "pool_memory": f"memory of each pool, reserved at start, for example 256MiB (default: {_POOL_MEMORY // MIB}MiB)",
    "num_pools": "most pools, that is KV specs, at once",
    "keep_idle_pools": "refuse a KV spec beyond them instead of forgetting what an idle pool has cached",
    "num_blocks": "blocks of each pool instead of --pool-memory, reserved when its first session opens",
    "max_sequences": "most live sequences of a pool",
    "max_tokens_per_sequence": "most tokens of a sequence (default: what a pool holds)",
    "max_sessions": "most live sessions",
    "watermark": "share of a pool kept free for running sequences when others start",
    "evict_above": "share of a pool above which cached blocks are evicted before they are needed",
    "pressure_levels": "shares of a pool, held, at which pressure is medium, high and critical (default: 0.6,0.8,0.95)",
    "eviction_policy": "which cached block is forgotten first: " + ", ".join(POLICY_NAMES),
    "prefix_caching": "share committed prefixes between sequences",
    "prefix_ttl": "seconds that a cached block lives without being used (default: for ever)",
    "min_prefix_tokens": "a start takes nothing from the cache where it would take less",
    "max_cached_blocks": "most blocks of a pool that are cached and held by nobody (default: all)",
    "tenant_quota": "share of a pool that a tenant may keep cached, 0 to 0.5, or 1 for no quota",
    "logits_memory": "memory of each pool for stored last-token logits, for example 64MiB (default: none are stored)",
    "tenant_quotas": "tenants with another quota, such as a=0.1,b=0.5 (default: none)",
    "host_memory": "memory of each pool's host tier, for what the pool has no room for, for example 1GiB (default: none)",
    "num_host_blocks": "blocks of each pool's host tier instead of --host-memory",
    "metrics_listen": "loopback host:port that serves /metrics for Prometheus (default: none)",
    "trace_endpoint": "URL of an OpenTelemetry collector, http://host:4318/v1/traces, that gets traces (default: none)",
    "reflection": "answer gRPC server reflection",
    "drain_timeout": "seconds that live sessions have to close once the service is asked to stop",
    "log_level": ", ".join(LOG_LEVELS),
}

_SOURCE = ConfigSource(
    CacheConfig,
    program="kvkeeper cache",
    description="The cache service: owns the KV cache's memory and block tables.",
    environment_prefix="KVKEEPER_CACHE_",
    example="POOL_MEMORY=1GiB",
    parsers=_PARSERS,
    help=_HELP,
)


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> CacheConfig:
    """Flags over KVKEEPER_CACHE_* over defaults. Raises ConfigError; --help ends in argparse's SystemExit."""
    return _SOURCE.load(argv, environ)
