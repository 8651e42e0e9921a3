"""`tests.benchmarks.kv_quality`: rows of each way and length against the exact one, from a model and texts of a folder."""

import json
from pathlib import Path

import pytest

from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.benchmarks.kv_quality import main

ARGUMENTS = ("--length", "96", "--length", "64", "--way", "int8", "--way", "int4:1000", "--texts", "1", "--needles", "1")
BESIDE_BFLOAT16 = (
    "--length",
    "64",
    "--length",
    "128",
    "--way",
    "int8",
    "--way",
    "int8:64",
    "--way",
    "bfloat16",
    "--texts",
    "2",
)


def test_each_way_is_told_at_each_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "quality.png"
    assert main([*ARGUMENTS, "--json", "--plot", str(picture)]) == 0
    found = {(row["way"], row["length"]): row for row in json.loads(capsys.readouterr().out)}
    assert found.keys() == {(way, length) for way in ("exact", "int8", "int4, tail 1000") for length in (64, 96)}
    for length in (64, 96):
        exact, int8, whole = (found[way, length] for way in ("exact", "int8", "int4, tail 1000"))
        assert exact["perplexity"] > 1
        assert (exact["perplexity_percent"], exact["attention_error"]) == (0, 0)
        assert 1e-4 < int8["attention_error"] < 0.05
        assert int8["greatest_attention_error"] > int8["attention_error"]
        assert whole["attention_error"] < 1e-5  # the tail has all tokens
        assert whole["attention_error_alone"] < 1e-5
        assert exact["greatest_attention_error_alone"] < 1e-5
        assert 1e-4 < int8["attention_error_alone"] < int8["greatest_attention_error_alone"] < 0.1
        assert 0 <= int8["needles_found"] <= 1
    assert picture.stat().st_size > 1000


def test_with_a_tail_int8_takes_less_than_a_third_of_the_error_that_bfloat16_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BESIDE_BFLOAT16, "--needles", "0", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    whole, tail, bfloat16 = (row["attention_error"] for row in rows if row["length"] == 128 and row["way"] != "exact")
    assert 0 < tail < bfloat16 / 3 < whole


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--way", "int9"), "int9"),
        (("--way", "int8:x"), "int8:x"),
        (("--length", "1000000"), "no text has so many tokens"),
        (("--text", "/nowhere"), "--text /nowhere"),
        (("--model", "/nowhere"), "--model /nowhere"),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_line(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments]) == 2
    assert problem in capsys.readouterr().err


def test_a_table_is_printed_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.py"
    text.write_text("def add(a, b):\n    return a + b\n" * 40)
    arguments = ("--length", "64", "--way", "int4", "--texts", "1", "--needles", "0")
    assert main(["--model", str(DEMO_MODEL_DIR), "--text", str(text), *arguments]) == 0
    head, _, exact, int4 = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "way"
    assert "+0.000 %" in exact
    assert int4.startswith("int4")
