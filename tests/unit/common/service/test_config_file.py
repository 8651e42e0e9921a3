"""Settings in a TOML file: read by table, below flags and variables, and each mistake told in one line with its place."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvkeeper.cache_service.config import SOURCE as CACHE
from kvkeeper.common.hold.config import SOURCE as HOLD
from kvkeeper.common.service.config import ConfigSource
from kvkeeper.common.service.config_file import TABLES, read_addresses
from kvkeeper.common.service.settings import ConfigError, between, check_settings, setting
from kvkeeper.common.service.sizes import parse_size
from kvkeeper.engine_service.config import SOURCE as ENGINE


@dataclass(frozen=True, slots=True)
class Config:
    num_blocks: int | None = setting(None, group="Pool", help="blocks", check=between(2, 8), default_text="all")
    memory: int = setting(3 << 20, group="Pool", help="bytes", parse=parse_size)
    share: float = setting(0.5, group="Pool", help="share")
    policy: str = setting("lru", group="Pool", help="order", choices=("lru", "fifo"))
    is_kept: bool = setting(True, group="Pool", help="keep it")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.num_blocks == 7 and self.policy == "fifo":
            raise ConfigError("--num-blocks: not 7 with --policy fifo")


SOURCE = ConfigSource(Config, "program cache", "A program.", "PREFIX_", "MEMORY=1GiB")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvkeeper.toml"
    path.write_text('[cache]\nnum-blocks = 4\nmemory = "2KiB"\nshare = 1\nis-kept = false\n\n[engine]\nanything = 1\n')
    return path


def load(path: Path, *argv: str, **environ: str) -> Config:
    config: Config = SOURCE.load(["--config", str(path), *argv], environ)
    return config


def test_the_file_stands_below_variables_and_flags(file: Path) -> None:
    assert load(file) == Config(num_blocks=4, memory=2048, share=1.0, is_kept=False)
    assert load(file, PREFIX_NUM_BLOCKS="5").num_blocks == 5
    assert load(file, "--num-blocks", "6", PREFIX_NUM_BLOCKS="5").num_blocks == 6
    assert load(file, "--is-kept").is_kept
    assert SOURCE.load([], {"PREFIX_CONFIG": str(file)}) == load(file)


def test_each_setting_tells_where_it_stands(file: Path) -> None:
    origins = SOURCE.origins(["--config", str(file), "--policy", "fifo"], {"PREFIX_SHARE": "0.25"})
    assert [(each.setting.name, each.text, each.place) for each in origins] == [
        ("num_blocks", "4", f"{file}: [cache] num-blocks"),
        ("memory", "2KiB", f"{file}: [cache] memory"),
        ("share", "0.25", "PREFIX_SHARE"),
        ("policy", "fifo", "--policy"),
        ("is_kept", "off", f"{file}: [cache] is-kept"),
    ]
    first = SOURCE.origins([], {})[0]
    assert (first.text, first.place) == ("all", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cache]\nnum-bloks = 4", "{file}: [cache] num-bloks: there is no such setting, did you mean num-blocks?"),
        ("[cache]\nnum_blocks = 4", "{file}: [cache] num_blocks: there is no such setting, did you mean num-blocks?"),
        ("[cache]\nnum-blocks = 9", "{file}: [cache] num-blocks: 2 to 8, not 9"),
        ("[cache]\nnum-blocks = 4.5", "{file}: [cache] num-blocks: a number, not '4.5'"),
        ("[cache]\nnum-blocks = true", "{file}: [cache] num-blocks: a number or a text, not true"),
        ("[cache]\nnum-blocks = [4]", "{file}: [cache] num-blocks: a number or a text, not a list"),
        ("[cache]\nis-kept = 'on'", "{file}: [cache] is-kept: true or false, not 'on'"),
        ("[cache]\nnum-blocks = 7\npolicy = 'fifo'", "{file}: [cache] num-blocks: not 7 with {file}: [cache] policy fifo"),
        ("[cahce]\nnum-blocks = 4", "{file}: [cahce]: there is no such table, did you mean cache?"),
        ("num-blocks = 4", "{file}: num-blocks stands in no table; write it under [cache] or [engine]"),
        ("[cache\n", "--config {file}: not TOML: "),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "kvkeeper.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert str(refused.value).startswith(message.format(file=path))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--config .*missing: No such file or directory$"):
        load(tmp_path / "missing")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"^--config .*bytes: not TOML"):
        load(tmp_path / "bytes")


def test_both_services_and_the_holder_have_a_table() -> None:
    assert tuple(source.program.split()[-1] for source in (CACHE, ENGINE, HOLD)) == TABLES


def test_addresses_are_found_for_those_who_start_both(tmp_path: Path) -> None:
    path = tmp_path / "kvkeeper.toml"
    path.write_text('[cache]\nlisten = "unix:/a"\n[engine]\ntoken-budget = 3\n')
    assert read_addresses(path) == {"cache": "unix:/a"}
