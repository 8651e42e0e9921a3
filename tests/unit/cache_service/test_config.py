"""Configuration: flags over environment over defaults."""

import pytest

from kvkeeper.cache_service.config import SOURCE, CacheConfig, ConfigError
from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.cache_service.runtime.pool_sizes import PoolSizes
from kvkeeper.common.service.sizes import parse_size


def test_defaults() -> None:
    config = SOURCE.load([], {})
    assert config == CacheConfig()
    assert (config.listen, config.max_sequences, config.max_tokens_per_sequence) == ("127.0.0.1:7410", 256, None)
    assert config.num_blocks is None


@pytest.mark.parametrize("address", ["0.0.0.0:7420", "[::]:7420", "10.1.2.3:1", "localhost:0", ""])
def test_health_may_be_asked_from_anywhere(address: str) -> None:
    assert SOURCE.load(["--health-address", address], {}).health_address == address


def test_a_pool_follows_each_rule_that_there_is_a_setting_for() -> None:
    rules = {"max_sequences": 9, "eviction_policy": "lru", "watermark": 0.2, "evict_above": 0.9, "soon_share": 0.1}
    rules |= {"pressure_levels": (0.1, 0.2, 0.3), "prefix_caching": False, "prefix_ttl": 5.0, "min_prefix_tokens": 32}
    rules |= {"max_cached_blocks": 7, "tenant_quota": 0.25, "tenant_quotas": (("a", 0.5),), "logits_memory": 1 << 20}
    pool, _ = PoolSizes(CacheConfig(num_blocks=64, **rules)).of(KvSpec(b"k", "m", 1, 1, 8, 2, 16))
    assert {name: getattr(pool, name) for name in rules} == rules


@pytest.mark.parametrize(
    ("text", "num_pools", "num_bytes"), [("80%", 2, 400), ("95%", 1, 950), ("1%", 64, 0), ("3MiB", 2, 3072)]
)
def test_a_share_is_of_what_is_free_and_divided_by_the_pools(text: str, num_pools: int, num_bytes: int) -> None:
    config = SOURCE.load(["--pool-memory", text, "--num-pools", str(num_pools)], {})
    assert PoolSizes(config, lambda: 1000 << 10).pool_memory == max(num_bytes, 64) << 10


def test_flags_win_over_the_environment() -> None:
    environ = {"KVKEEPER_CACHE_MAX_SEQUENCES": "8", "KVKEEPER_CACHE_POOL_MEMORY": "1MiB", "KVKEEPER_CACHE_REFLECTION": "off"}
    config = SOURCE.load(["--max-sequences", "9", "--no-prefix-caching"], environ)
    assert (config.max_sequences, config.pool_memory, config.reflection, config.prefix_caching) == (9, 1 << 20, False, False)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--num-pool", "3"], "unknown flag --num-pool, did you mean --num-pools?"),
        (["--num-pool=3"], "unknown flag --num-pool, did you mean --num-pools?"),
        (["--no-prefix-cache"], "unknown flag --no-prefix-cache, did you mean --no-prefix-caching?"),
        (["--qqq", "3"], "unknown flag --qqq (see kvkeeper cache --help)"),
        (["3"], "unexpected argument '3' (see kvkeeper cache --help)"),
        (["--num-pools"], "--num-pools: expected one argument (see kvkeeper cache --help)"),
        (["--reflection=on"], "--reflection/--no-reflection: ignored explicit argument 'on' (see kvkeeper cache --help)"),
        (["--listen", "127.0.0.1:80000"], "--listen: a port is at most 65535, not 80000"),
        (["--listen", ":7410"], "--listen: host:port such as 127.0.0.1:7410, or unix:/path, not ':7410'"),
        (["--metrics-listen", ":7543"], "--metrics-listen: host:port such as 127.0.0.1:7412, not ':7543'"),
        (["--metrics-listen", "unix:/x"], "--metrics-listen: host:port such as 127.0.0.1:7412, not 'unix:/x'"),
        (
            ["--health-address", "node:7420"],
            "--health-address: an IP address and a port such as 0.0.0.0:7413, not 'node:7420'",
        ),
        (
            ["--health-address", "0.0.0.0:70000"],
            "--health-address: an IP address and a port such as 0.0.0.0:7413, not '0.0.0.0:70000'",
        ),
        (["--pool-memory", "1KiB"], "--pool-memory: 64 KiB to 64 TiB, or 1% to 95% of what is free, not 1 KiB"),
        (["--pool-memory", "96%"], "--pool-memory: 64 KiB to 64 TiB, or 1% to 95% of what is free, not 96%"),
        (
            ["--pool-memory", "8GB"],
            "--pool-memory: a number of bytes such as 268435456, 256MiB or 2GiB, or a share such as 80%, not '8GB'",
        ),
        (
            ["--pool-memory", "80%", "--memory-dir", "/x"],
            "--pool-memory that is a share has another size at each start, so --memory-dir needs an amount",
        ),
        (["--keep"], "--keep needs a folder to keep the memory in, see --memory-dir"),
        (["--take-over"], "--take-over needs the folder of the service that runs, see --memory-dir"),
        (["--block-digests"], "--block-digests are of memory that is kept, see --memory-dir"),
        (
            ["--block-digests", "--memory-dir", "/x", "--device", "cuda:1"],
            "--block-digests reads memory of the machine, so it needs --device cpu",
        ),
        (["--verify-blocks", "-1"], "--verify-blocks: 0 to 33554432, not -1"),
        (
            ["--memory-dir", "/x", "--device", "cuda"],
            "--memory-dir holds memory of the machine, so it needs --device cpu, or a holder, see --hold",
        ),
        (["--hold", "unix:/h"], "--hold keeps pools on a CUDA device, so it needs --device cuda and --memory-dir"),
        (
            ["--hold", "unix:/h", "--memory-dir", "/x"],
            "--hold keeps pools on a CUDA device, so it needs --device cuda and --memory-dir",
        ),
        (
            ["--hold", "unix:/h", "--device", "cuda"],
            "--hold keeps pools on a CUDA device, so it needs --device cuda and --memory-dir",
        ),
        (["--disk-path", "/x"], "a disk tier has a folder and a size, see --disk-path and --disk-memory"),
        (["--disk-memory", "1GiB"], "a disk tier has a folder and a size, see --disk-path and --disk-memory"),
        (
            ["--disk-path", "/x", "--disk-memory", "1GiB"],
            "--disk-path takes what leaves the host tier, so it needs one, see --host-memory",
        ),
        (
            ["--disk-path", "/x", "--disk-memory", "1GiB", "--host-memory", "1GiB", "--prefix-ttl", "5"],
            "--disk-path keeps blocks without an end, so it does not go with --prefix-ttl",
        ),
        (["--disk-tenants", "a"], "--disk-tenants is of a disk tier, so it needs one, see --disk-path"),
        (["--remote-tenants", "a"], "--remote-tenants is of a remote tier, so it needs one, see --remote"),
        # With a list that came out empty, all tenants' blocks would be stored; with a space, none of b's.
        (["--remote-tenants", ""], "--remote-tenants: names, each once and without spaces around it, such as a,b, not ''"),
        (["--disk-tenants", "a, b"], "--disk-tenants: names, each once and without spaces around it, such as a,b, not 'a, b'"),
        (["--hold", "127.0.0.1:1"], "--hold: unix:/path, not '127.0.0.1:1'"),
    ],
)
def test_what_cannot_be_read_is_one_line(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        SOURCE.load(argv, {})
    assert str(refused.value) == line
    assert capsys.readouterr() == ("", "")  # no usage before it


def test_help_lists_the_eviction_policies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        SOURCE.load(["--help"], {})
    said = " ".join(capsys.readouterr().out.split())
    assert f"which cached block is forgotten first: {', '.join(POLICY_NAMES)}" in said


def test_an_error_names_its_source() -> None:
    with pytest.raises(ConfigError, match="KVKEEPER_CACHE_NUM_POOLS"):
        SOURCE.load([], {"KVKEEPER_CACHE_NUM_POOLS": "two"})
    with pytest.raises(ConfigError, match="KVKEEPER_CACHE_PREFIX_CACHING"):
        SOURCE.load([], {"KVKEEPER_CACHE_PREFIX_CACHING": "maybe"})
    with pytest.raises(ConfigError, match=r"^KVKEEPER_CACHE_NUM_POOLS: 1 to 64, not 65$"):
        SOURCE.load([], {"KVKEEPER_CACHE_NUM_POOLS": "65"})
    with pytest.raises(ConfigError, match=r"^--num-pools: 1 to 64, not 66$"):
        SOURCE.load(["--num-pools", "66"], {"KVKEEPER_CACHE_NUM_POOLS": "65"})


@pytest.mark.parametrize(
    ("flags", "pool_tokens", "most"),
    [
        ([], 131_072, 131_072),  # all that the pool holds
        ([], 1 << 30, 1 << 22),  # but no more than a message brings
        (["--max-sequences", "65536"], 1 << 30, 1 << 22),  # however many there may be
        ([], 64, 4096),  # with retention, more than the pool holds at once
        (["--max-tokens-per-sequence", "512"], 131_072, 512),
    ],
)
def test_how_long_a_sequence_gets(flags: list[str], pool_tokens: int, most: int) -> None:
    config = SOURCE.load(flags, {})
    assert config.tokens_of_sequence(pool_tokens) == most <= config.most_tokens


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("12B", 12), ("3KiB", 3 << 10), ("256MiB", 256 << 20), ("2 GiB", 2 << 30), ("1TiB", 1 << 40)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1MB", "-1", "1.5GiB", "1e9", "9" * 30])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="number of bytes"):
        parse_size(text)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.8.8.8:7410", "[::1]:7410", "localhost:7410", "unix:/run/x.sock"])
def test_addresses_that_are_served(listen: str) -> None:
    assert CacheConfig(listen=listen).listen == listen


def test_what_bounds_the_prefix_cache() -> None:
    config = SOURCE.load(["--prefix-ttl", "2.5", "--tenant-quota", "0.25", "--tenant-quotas", "a=0.1,b=c=0.5,=1"], {})
    assert (config.prefix_ttl, config.tenant_quota) == (2.5, 0.25)
    assert config.tenant_quotas == (("a", 0.1), ("b=c", 0.5), ("", 1.0))
    assert SOURCE.load([], {}).tenant_quotas == ()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--prefix-ttl", value) for value in ("0", "-1", "nan", "inf", "x")),
        *(("--tenant-quota", value) for value in ("-0.1", "0.6", "nan", "1.5")),
        *(("--tenant-quotas", value) for value in ("a", "a=", "a=x", "a=-1", "a=0.6", "a=0.1,a=0.2", "a=0.1,")),
        *(("--max-cached-blocks", value) for value in ("-1", "1.5")),
        ("--min-prefix-tokens", "-1"),
        *(("--listen", value) for value in ("127.0.0.1", "unix:relative", "unix:/" + "x" * 120)),
        ("--runtime-dir", "/" + "x" * 120),
        *(("--pool-memory", value) for value in ("much", "0", "0%", "100%", "%", "8.5%")),
        *(("--num-blocks", value) for value in ("1", "many")),
        *((flag, "0") for flag in ("--num-pools", "--max-sequences", "--max-sessions")),
        ("--max-tokens-per-sequence", "4194305"),
        ("--eviction-policy", "random"),
        ("--log-level", "loud"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_flag(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        SOURCE.load([f"{flag}={value}"], {})
