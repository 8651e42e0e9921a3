"""A setting is declared once: its flag, variable, help, default and check come from one field."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvkeeper.cache_service.config import SOURCE as CACHE
from kvkeeper.common.service.config import ConfigSource
from kvkeeper.common.service.settings import ConfigError, between, check_settings, list_settings, setting
from kvkeeper.common.service.sizes import parse_size
from kvkeeper.engine_service.config import SOURCE as ENGINE


@dataclass(frozen=True, slots=True)
class Config:
    num_blocks: int | None = setting(None, group="Pool", help="blocks", check=between(2, 8), default_text="all")
    memory: int = setting(3 << 20, group="Pool", help="bytes", parse=parse_size, example="1GiB")
    policy: str = setting("lru", group="Pool", help="order", choices=("lru", "fifo"))
    is_kept: bool = setting(True, group="Pool", help="keep it")
    folder: Path = setting(Path("/x"), group="Pool", help="where", default_text="a folder")

    def __post_init__(self) -> None:
        check_settings(self)


SOURCE = ConfigSource(Config, "program", "A program.", "PREFIX_", "MEMORY=1GiB")


def test_all_that_is_told_comes_from_the_field() -> None:
    num_blocks, memory, policy, is_kept, folder = list_settings(Config)
    assert (num_blocks.flag, SOURCE.variable(num_blocks)) == ("--num-blocks", "PREFIX_NUM_BLOCKS")
    assert (num_blocks.help_text, num_blocks.values) == ("blocks (default: all)", "2 to 8")
    assert memory.help_text == "bytes, for example 1GiB (default: 3MiB)"
    assert policy.help_text == "order: lru, fifo (default: lru)"
    assert (is_kept.help_text, is_kept.values) == ("keep it (default: on)", "on or off")
    assert folder.help_text == "where (default: a folder)"


def test_flags_and_variables_are_read_by_the_type_of_the_field() -> None:
    config = SOURCE.load(["--memory", "2KiB", "--no-is-kept"], {"PREFIX_NUM_BLOCKS": "7", "PREFIX_FOLDER": "/y"})
    assert config == Config(num_blocks=7, memory=2048, is_kept=False, folder=Path("/y"))


def test_a_value_is_checked_wherever_it_comes_from() -> None:
    with pytest.raises(ConfigError, match=r"^--num-blocks: 2 to 8, not 9$"):
        Config(num_blocks=9)
    with pytest.raises(ConfigError, match=r"^PREFIX_NUM_BLOCKS: 2 to 8, not 1$"):
        SOURCE.load([], {"PREFIX_NUM_BLOCKS": "1"})
    with pytest.raises(ConfigError, match=r"^--policy: one of lru, fifo, not 'mru'$"):
        SOURCE.load(["--policy", "mru"], {})


@pytest.mark.parametrize("source", [CACHE, ENGINE], ids=["cache", "engine"])
def test_every_setting_of_a_service_is_explained(source: ConfigSource) -> None:
    for one in list_settings(source.config):
        assert one.help and one.group, one.name
        assert one.values or one.example or one.default_text, one.name
    with_default = [one for one in list_settings(source.config) if one.check and isinstance(one.default, int | float | str)]
    assert [one.name for one in with_default if one.check and one.check.refusal(one.default)] == []


@pytest.mark.parametrize("source", [CACHE, ENGINE], ids=["cache", "engine"])
def test_help_names_every_flag(source: ConfigSource, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        source.load(["--help"], {})
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for one in list_settings(source.config):
        assert f" {one.flag}" in said
        assert one.help.split(":")[0].split("-")[0] in said
