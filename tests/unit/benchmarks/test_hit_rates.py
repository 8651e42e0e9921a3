"""`python -m tests.benchmarks.hit_rates`: a picture of what a trace hits by capacity, beside lru and the optimum."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.hit_rates import curves, main


def write(path: Path) -> str:
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in ([1, 2], [3, 4], [1, 2])))
    return str(path)


def test_a_plot_is_a_picture_and_nothing_beside_it(tmp_path: Path) -> None:
    picture = tmp_path / "plot.png"
    assert main([str(picture), write(tmp_path / "t")]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "t"]


def test_lru_and_the_optimum_stand_beside_a_policy() -> None:
    found = curves(["adaptive"], [[0, 1], [2, 3], [0, 1]])
    assert list(found) == ["adaptive", "lru", "optimum"]
    assert all([blocks for blocks, _ in points] == [2, 3, 4] for points in found.values())
    assert found["optimum"][-1] == found["lru"][-1] == (4, round(2 / 6, 4))


def test_a_plot_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "no" / "plot.png"), write(tmp_path / "t")]) == 2
    assert "plot.png cannot be written: No such file or directory" in capsys.readouterr().err
