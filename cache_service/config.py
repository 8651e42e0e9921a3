"""Configuration of the cache service: one frozen value, made here from flags over environment over defaults.

Owns every default, range and name; nothing else reads the command line or the environment. A wrong value is a ConfigError of
one line that names the flag. Does not look at the machine: whether memory or an address can be had is found out at start.
"""

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvkeeper.common.service.config import ConfigSource
from kvkeeper.common.service.settings import (
    DEVICE,
    MAX_SOCKET_PATH_BYTES,
    OPTIONAL_HOLDER_ADDRESS,
    Check,
    ConfigError,
    between,
    check_settings,
    listen_setting,
    must_be,
    setting,
    size_between,
)
from kvkeeper.common.service.sizes import Share, parse_amount, size
from kvkeeper.common.trust.settings import (
    ServiceConfig,
    check_trust,
)

from .core.blocks.pressure import PressureGauge
from .core.eviction import POLICY_NAMES
from .core.values.errors import InvalidField
from .memory.remote.remote_address import FORM_WORDS, parse_address

MIB = 1 << 20
LEAST_POOL_MEMORY = 64 << 10
MAX_POOL_BLOCKS = 1 << 24
_MAX_TINY_BLOCKS = 1 << 20  # that are made of an amount of memory, so that the core's arrays do not outgrow it
_TINY = 4096  # bytes
_MAX_RUNTIME_DIR_BYTES = MAX_SOCKET_PATH_BYTES - len("/attach-0123456789abcdef.sock")
_MAX_TOKENS = 1 << 22  # of one
_LEAST_TOKENS = 4096  # that a sequence can have on a pool that holds fewer, when it gives blocks back on the way
_MOST_OF_A_TENANT = 0.5  # so that what one tenant has cached never keeps all others from theirs


def most_blocks(num_bytes: int, block_bytes: int) -> int:
    """Blocks that are made of so much memory, where their number is not given."""
    return min(num_bytes // block_bytes, MAX_POOL_BLOCKS if block_bytes >= _TINY else _MAX_TINY_BLOCKS)


def _default_runtime_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvkeeper" if base else Path(tempfile.gettempdir()) / f"kvkeeper-{os.getuid()}"


def parse_quotas(text: str) -> tuple[tuple[str, float], ...]:
    """Shares by tenant of "a=0.1,b=0.5". Raises ValueError."""
    quotas: dict[str, float] = {}
    for item in text.split(",") if text else ():
        tenant, equals, share = item.rpartition("=")
        if not equals or tenant in quotas or re.fullmatch(r"[\d.]{1,20}", share) is None:
            raise ValueError("shares by tenant, each once, such as a=0.1,b=0.5")
        quotas[tenant] = float(share)
    return tuple(quotas.items())


def parse_names(text: str) -> tuple[str, ...]:
    """Names of "a,b". Raises ValueError, also for none at all: an empty list must not be taken for everybody."""
    names = tuple(text.split(","))
    if _names_refusal(names):
        raise ValueError("names, each once and without spaces around it, such as a,b")
    return names


def _names_refusal(names: Sequence[str]) -> str | None:
    are_names = all(name and name == name.strip() for name in names) and len(set(names)) == len(names)
    return None if are_names else "names, each once and without spaces around it"


def parse_shares(text: str) -> tuple[float, ...]:
    """Shares of "0.6,0.8,0.95". Raises ValueError."""
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError:
        raise ValueError("three shares such as 0.6,0.8,0.95") from None


def _runtime_dir_refusal(path: Path) -> str | None:
    is_short = len(os.fsencode(path)) <= _MAX_RUNTIME_DIR_BYTES
    return None if is_short else f"a path of at most {_MAX_RUNTIME_DIR_BYTES} bytes, for the sockets in it"


def _remote_refusal(text: str) -> str | None:
    """Never repeats the text: it may hold a password."""
    try:
        parse_address(text or "redis://localhost:1")
    except ValueError as error:
        return str(error)
    return None


def _pressure_refusal(shares: tuple[float, ...]) -> str | None:
    try:
        PressureGauge(shares, 1)
    except InvalidField as error:
        return str(error)
    return None


def _quotas_refusal(quotas: tuple[tuple[str, float], ...]) -> str | None:
    return next((reason for _, share in quotas if (reason := _QUOTA.refusal(share))), None)


_QUOTA = must_be(
    f"0 to {_MOST_OF_A_TENANT}, or 1 for no quota", lambda share: 0 <= share <= _MOST_OF_A_TENANT or share == 1, str
)
_POOL_MEMORY = must_be(
    f"{size(LEAST_POOL_MEMORY)} to 64 TiB, or 1% to 95% of what is free",
    lambda amount: 0 < amount.percent <= 95 if isinstance(amount, Share) else LEAST_POOL_MEMORY <= amount <= 1 << 46,
    size,
    parse=parse_amount,
)
_TENANTS = Check("TENANT, ...", _names_refusal)


_addresses = partial(setting, group="Addresses")
_pools = partial(setting, group="Pools")
_prefix_cache = partial(setting, group="Prefix cache")
_host_tier = partial(setting, group="Host tier")
_disk_tier = partial(setting, group="Disk tier")
_remote_tier = partial(setting, group="Remote tier")
_stopping = partial(setting, group="Stopping")


@dataclass(frozen=True, slots=True)
class CacheConfig(ServiceConfig):
    """Everything that is decided before the service starts. Raises ConfigError for a value out of its range."""

    listen: str = listen_setting("127.0.0.1:7410")
    runtime_dir: Path = _addresses(
        _default_runtime_dir,
        "folder of the attach socket",
        default_text="$XDG_RUNTIME_DIR/kvkeeper, or a private temporary one",
        check=Check("a path", _runtime_dir_refusal),
        details="It is made with mode 0700.",
    )
    device: str = _pools("cpu", "where pools are: cpu, cuda or cuda:N; engines on it need the same device", check=DEVICE)
    device_wait: float = _pools(
        30.0,
        "seconds that a start waits for memory of a CUDA device which an earlier run's engines still have",
        check=between(0, 3600, "seconds"),
        details="The log says so. The memory of a pool comes back when the last engine has unmapped it.",
    )
    quarantine_quiet: float = _pools(
        1.0,
        "seconds that blocks a killed engine may have been writing on a CUDA device stay out of use after its end",
        check=between(0, 60, "seconds"),
        details="Kernels that it had queued run until the driver has ended them. make gpu-check measures how long"
        " (quiet_after_ms of part a).",
    )
    pool_memory: int | Share = _pools(
        256 * MIB,
        "memory of each pool, reserved at start",
        example="256MiB",
        check=_POOL_MEMORY,
        details="80% is a share of what is free at start, on the device or the host, divided by --num-pools. On a CUDA device"
        " kvkeeper up has a default of its own, see size.md. Without effect where --num-blocks is given.",
    )
    memory_dir: Path | None = _pools(
        None,
        "folder on tmpfs in which the memory of pools outlives a service that is killed",
        default_text="memory without a name, which ends with the service",
        details="It is made with mode 0700, and is of one service at a time. The next service takes over what it finds there.",
    )
    keep: bool = _pools(False, "leave the memory in --memory-dir also when the service is asked to stop")
    take_over: bool = _pools(
        False,
        "ask the service that has --memory-dir to stop, and go on with its memory and at its address",
        details="It must keep its memory, see --keep. Everything slow is done before it is asked.",
    )
    hold: str = _pools(
        "",
        "address of kvkeeper hold, which keeps pools on a CUDA device while the service is away",
        example="unix:/run/user/1000/kvkeeper/hold.sock",
        default_text="none",
        check=OPTIONAL_HOLDER_ADDRESS,
        details="With --memory-dir on a device, and only there. A start without the holder is a cold one.",
    )
    block_digests: bool = _pools(
        False,
        "write a digest of each cached block beside it in --memory-dir, and verify blocks at start",
        details="It finds memory that another program has overwritten.",
    )
    verify_blocks: int = _pools(
        256,
        "cached blocks that a start compares with their digests, 0 for all",
        check=between(0, 2 * MAX_POOL_BLOCKS),
        details="Where one is wrong, all are compared. Without effect without --block-digests.",
    )
    num_pools: int = _pools(2, "most pools, that is KV specs, at once", check=between(1, 64))
    keep_idle_pools: bool = _pools(
        False,
        "refuse a KV spec beyond --num-pools instead of forgetting what an idle pool has cached",
        details="Either way the client is told.",
    )
    num_blocks: int | None = _pools(
        None,
        "blocks of each pool instead of --pool-memory, reserved when its first session opens",
        default_text="as many as --pool-memory holds",
        check=between(2, MAX_POOL_BLOCKS),
        details="The null block is one of them. Without a number, a pool of blocks below 4 KiB has at most 1,048,576.",
    )
    max_sequences: int = _pools(
        256,
        "most live sequences of a pool",
        check=between(1, 1 << 16),
        details="A caller that is no engine leaves a tenth of them to others.",
    )
    max_tokens_per_sequence: int | None = _pools(
        None,
        "most tokens of a sequence",
        default_text=f"what a pool holds, {_MAX_TOKENS} at most",
        check=between(1, _MAX_TOKENS),
        details="The engine says at start what bounds it below what its model can do.",
    )
    max_sessions: int = _pools(
        64,
        "most live sessions",
        check=between(1, 4096),
        details="A caller leaves a tenth of them to others. It is a tenant, else a connection, or on a Unix socket what the"
        " client calls itself (client_name).",
    )
    eviction_policy: str = _prefix_cache("adaptive", "which cached block is forgotten first", choices=POLICY_NAMES)
    watermark: float = _pools(
        0.01,
        "share of a pool kept free for running sequences when others start",
        check=must_be("a share from 0 to below 1", lambda share: 0 <= share < 1),
        details="Nothing is kept free while no sequence runs.",
    )
    evict_above: float = _prefix_cache(
        1.0,
        "share of a pool above which cached blocks are evicted before they are needed",
        check=must_be("a share above 0 and up to 1", lambda share: 0 < share <= 1),
        details="They are evicted between two steps.",
    )
    soon_share: float = _prefix_cache(
        0.25,
        "share of a pool that is kept because clients expect to use it again soon",
        check=must_be("a share from 0 to 1", lambda share: 0 <= share <= 1),
        details="Above it, and after a minute, such blocks are evicted like others, those that wait longest first.",
    )
    pressure_levels: tuple[float, ...] = _pools(
        (0.6, 0.8, 0.95),
        "shares of a pool, held, at which pressure is medium, high and critical",
        default_text="0.6,0.8,0.95",
        parse=parse_shares,
        check=Check("three shares above 0 and up to 1", _pressure_refusal),
        details="Each level is left 0.05 below its share.",
    )
    prefix_caching: bool = _prefix_cache(True, "share committed prefixes between sequences")
    prefix_ttl: float | None = _prefix_cache(
        None,
        "seconds that a cached block lives without being used",
        default_text="for ever",
        check=between(0.001, 30 * 86_400, "seconds"),
    )
    min_prefix_tokens: int = _prefix_cache(
        0, "a start takes nothing from the cache where it would take less", check=between(0, 1 << 22, "tokens")
    )
    max_cached_blocks: int | None = _prefix_cache(
        None,
        "most blocks of a pool that are cached and held by no sequence",
        default_text="all",
        check=between(0, MAX_POOL_BLOCKS),
    )
    tenant_quota: float = _prefix_cache(
        1.0,
        "share of a pool that a tenant may keep cached, 0 to 0.5, or 1 for no quota",
        check=_QUOTA,
        details="Above it the tenant's own blocks are evicted first.",
    )
    tenant_quotas: tuple[tuple[str, float], ...] = _prefix_cache(
        (),
        "tenants with another quota",
        example="a=0.1,b=0.5",
        default_text="none",
        parse=parse_quotas,
        check=Check("TENANT=SHARE, ...", _quotas_refusal),
    )
    logits_memory: int = _prefix_cache(
        0, "memory of each pool for stored last-token logits", example="64MiB", check=size_between(0, 1 << 40)
    )
    host_memory: int = _host_tier(
        0,
        "memory of each pool's host tier, for what the pool has no room for",
        example="1GiB",
        check=size_between(0, 1 << 46),
        details="Swapped sequences go there, and cached blocks that the pool has no room for. It is reserved with the pool.",
    )
    num_host_blocks: int = _host_tier(
        0,
        "blocks of each pool's host tier instead of --host-memory",
        check=Check(f"0, or 2 to {MAX_POOL_BLOCKS}", lambda number: between(2, MAX_POOL_BLOCKS).refusal(number or 2)),
        details="The null block is one of them.",
    )
    host_kv_dtype: str = _host_tier(
        "auto",
        "what K and V are kept in below the device: as they are on the device (auto), or in fewer bits",
        choices=("auto", "fp8", "int8", "int4"),
        details="Of pools of 16- or 32-bit numbers; others keep theirs. What comes back is rounded: see quantised-kv.md.",
    )
    disk_path: Path | None = _disk_tier(
        None,
        "folder for blocks that left the host tier, found again by later runs, too",
        default_text="no disk tier",
        details="It is made with mode 0700, and is of one service at a time. It needs --disk-memory and a host tier.",
    )
    disk_memory: int = _disk_tier(0, "disk of each pool, taken whole at start", example="64GiB", check=size_between(0, 1 << 50))
    disk_admit: str = _disk_tier(
        "all",
        "what is stored: all that comes to the host tier, or what was loaded back from there",
        choices=("all", "second-use"),
        details="second-use spares the disk what is never seen again.",
    )
    disk_tenants: tuple[str, ...] = _disk_tier(
        (), "tenants whose blocks are stored", example="a,b", default_text="all", parse=parse_names, check=_TENANTS
    )
    disk_deadline: float = _disk_tier(
        2.0,
        "seconds that a sequence waits for its blocks from the disk, before it computes them",
        check=between(0.01, 60, "seconds"),
        details="An order that takes longer makes the disk rest.",
    )
    remote: str = _remote_tier(
        "",
        "Valkey or Redis server or cluster, or master of a Mooncake store, in which cache services share blocks",
        example="rediss://cache.internal:6379/0",
        default_text="no remote tier",
        check=Check(FORM_WORDS, _remote_refusal),
        details="Of a cluster, some nodes: redis://HOST:PORT,HOST:PORT?cluster=true. Without a user or a password, which are "
        "in --remote-secret. It needs that file and a host tier.",
    )
    remote_secret: Path | None = _remote_tier(
        None,
        "file with the key that services share, and the user and password of the server",
        default_text="none",
        details="Lines key = ..., user = ... and password = ..., mode 0600. Services with the same key share blocks.",
    )
    remote_memory: int = _remote_tier(
        0,
        "memory of this machine that each pool gives to the store of mooncake://",
        example="64GiB",
        check=size_between(0, 1 << 46),
        details="A Mooncake store has no memory but what its clients give. What is in it is lost when this service ends.",
    )
    remote_ca: Path | None = _remote_tier(
        None, "certificates that vouch for the server of rediss:// and valkeys://", default_text="those that the machine knows"
    )
    remote_admit: str = _remote_tier(
        "second-use",
        "what is stored: all that comes to the host tier, or what was loaded back from there",
        choices=("all", "second-use"),
        details="second-use keeps one service from flooding what others share.",
    )
    remote_tenants: tuple[str, ...] = _remote_tier(
        (), "tenants whose blocks are stored", example="a,b", default_text="all", parse=parse_names, check=_TENANTS
    )
    remote_ttl: float = _remote_tier(
        86_400.0, "seconds that a block lives there without being used", check=between(1, 30 * 86_400, "seconds")
    )
    remote_deadline: float = _remote_tier(
        1.0,
        "seconds that a sequence waits for its blocks from the remote tier, before it computes them",
        check=between(0.01, 60, "seconds"),
        details="A server that takes longer is left alone for a while.",
    )
    tier_worth: str = _disk_tier(
        "auto",
        "which loads from disk and remote tier are ordered: those that beat computing, or all",
        choices=("auto", "always"),
        details="auto compares what loads and prompts took lately. Before it has measured a few of both, it loads.",
    )
    drain_timeout: float = _stopping(
        3.0, "seconds that live sessions have to close once the service is asked to stop", check=between(0, 3600, "seconds")
    )

    def __post_init__(self) -> None:
        check_settings(self)
        check_trust(self)
        if isinstance(self.pool_memory, Share) and self.memory_dir is not None:
            raise ConfigError("--pool-memory that is a share has another size at each start, so --memory-dir needs an amount")
        if self.keep and self.memory_dir is None:
            raise ConfigError("--keep needs a folder to keep the memory in, see --memory-dir")
        if self.take_over and self.memory_dir is None:
            raise ConfigError("--take-over needs the folder of the service that runs, see --memory-dir")
        if self.block_digests and self.device != "cpu":
            raise ConfigError("--block-digests reads memory of the machine, so it needs --device cpu")
        if self.block_digests and self.memory_dir is None:
            raise ConfigError("--block-digests are of memory that is kept, see --memory-dir")
        if self.host_kv_dtype != "auto" and not (self.host_memory or self.num_host_blocks):
            raise ConfigError("--host-kv-dtype is of the host tier and those behind it, so it needs one, see --host-memory")
        if (self.disk_path is None) != (self.disk_memory == 0):
            raise ConfigError("a disk tier has a folder and a size, see --disk-path and --disk-memory")
        if self.disk_path is not None and not (self.host_memory or self.num_host_blocks):
            raise ConfigError("--disk-path takes what leaves the host tier, so it needs one, see --host-memory")
        if self.disk_path is not None and self.prefix_ttl is not None:
            raise ConfigError("--disk-path keeps blocks without an end, so it does not go with --prefix-ttl")
        if self.disk_tenants and self.disk_path is None:
            raise ConfigError("--disk-tenants is of a disk tier, so it needs one, see --disk-path")
        if self.remote_tenants and not self.remote:
            raise ConfigError("--remote-tenants is of a remote tier, so it needs one, see --remote")
        if bool(self.remote) != (self.remote_secret is not None):
            raise ConfigError("a remote tier has a server and a secret, see --remote and --remote-secret")
        if self.remote_memory and not self.remote.startswith("mooncake:"):
            raise ConfigError("--remote-memory is given to a store of mooncake://, see --remote")
        if self.remote_ca is not None and not self.remote.startswith(("rediss:", "valkeys:")):
            raise ConfigError("--remote-ca is for a server under TLS, see --remote")
        if self.remote and not (self.host_memory or self.num_host_blocks):
            raise ConfigError("--remote takes what leaves the host tier, so it needs one, see --host-memory")
        if self.remote and self.prefix_ttl is not None:
            raise ConfigError("--remote has a time to live of its own, so it does not go with --prefix-ttl")
        if self.memory_dir is not None and self.device != "cpu" and not self.hold:
            raise ConfigError("--memory-dir holds memory of the machine, so it needs --device cpu, or a holder, see --hold")
        if self.hold and (self.memory_dir is None or self.device == "cpu"):
            raise ConfigError("--hold keeps pools on a CUDA device, so it needs --device cuda and --memory-dir")

    @property
    def most_tokens(self) -> int:
        """Tokens of a sequence, however large a pool is."""
        return self.max_tokens_per_sequence or _MAX_TOKENS

    def tokens_of_sequence(self, pool_tokens: int) -> int:
        """Most tokens of a sequence of a pool that holds so many. One that gives blocks back can have more than that."""
        return self.max_tokens_per_sequence or min(self.most_tokens, max(pool_tokens, _LEAST_TOKENS))


SOURCE = ConfigSource(
    CacheConfig,
    program="kvkeeper cache",
    description="The cache service: owns the KV cache's memory and block tables.",
    environment_prefix="KVKEEPER_CACHE_",
    example="POOL_MEMORY=1GiB",
)
