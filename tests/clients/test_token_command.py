"""`kvkeeper token`: what it prints once is what the services let in."""

import json
import tomllib
from pathlib import Path

import pytest

from kvkeeper.cli import main
from kvkeeper.common.trust.caller import Caller, Role
from kvkeeper.common.trust.credentials import read_credentials


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["token", *flags]) == 0
    return capsys.readouterr().out


def test_the_token_and_its_entry_go_each_where_it_belongs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["token", "--name", "gateway", "--role", "client", "--tenant", "acme"]) == 0
    token, entry = capsys.readouterr()
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text(entry)
    token = token.removesuffix("\n")
    assert "\n" not in token
    assert read_credentials(path).by_token(token) == Caller("gateway", "acme", Role.CLIENT)
    assert token not in entry and tomllib.loads(entry)["token"][0]["tenant"] == "acme"


def test_for_programs_it_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(printed(capsys, "--name", "e", "--role", "engine", "--json"))
    assert said["token"].startswith("kvk_") and 'tenant = "*"' in said["entry"]


def test_two_tokens_are_two(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--name", "e", "--role", "engine", "--json")
    assert printed(capsys, *flags) != printed(capsys, *flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--name", "", "--role", "engine"],
        ["--name", "a\nb", "--role", "engine"],
        ["--name", "a", "--role", "root"],
        ["--name", "a"],
        ["--name", "a", "--role", "engine", "--tenant", "a*"],
        ["--name", "a", "--role", "engine", "--tenant", "t" * 65],
    ],
)
def test_an_entry_that_the_services_would_refuse_is_not_made(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["token", *flags])
    assert ended.value.code == 2
    assert "kvk_" not in "".join(capsys.readouterr())
