"""`kvkeeper config show`: every setting of both services, its value, and where that stands."""

import json
from pathlib import Path

import pytest

from kvkeeper.cli import main


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "kvkeeper.toml"
    path.write_text('[cache]\npool-memory = "64MiB"\n\n[engine]\nfair-share = true\n')
    return str(path)


def test_what_applies_is_shown_with_its_place(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVKEEPER_ENGINE_TOKEN_BUDGET", "77")
    assert main(["config", "show", "--config", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {service: {row.pop("setting"): row for row in rows} for service, rows in found.items()}
    assert by_name["cache"]["pool-memory"] == {"value": "64MiB", "from": f"{file}: [cache] pool-memory"}
    assert by_name["engine"]["fair-share"] == {"value": "on", "from": f"{file}: [engine] fair-share"}
    assert by_name["engine"]["token-budget"] == {"value": "77", "from": "KVKEEPER_ENGINE_TOKEN_BUDGET"}
    assert by_name["engine"]["policy"] == {"value": "adaptive", "from": "default"}


def test_defaults_can_be_left_out(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "cache", "--config", file, "--set"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[cache]"
    assert [line.split()[:2] for line in lines[3:]] == [["pool-memory", "64MiB"]]


def test_a_file_with_a_mistake_is_refused(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(file).write_text("[engine]\ntoken-bugdet = 1\n")
    assert main(["config", "show", "--config", file]) == 2
    assert "token-bugdet: there is no such setting, did you mean token-budget?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["up", "--config", file + "s"])
    assert ended.value.code == 2
    assert "No such file" in capsys.readouterr().err
