"""What applies where a request names no sampling field: generation_config.json, or else what changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.engine_service.compute.served_model import read_sampling_defaults
from kvkeeper.engine_service.model.checkpoint.errors import ModelConfigError
from kvkeeper.engine_service.values.sampling_params import GREEDY, SamplingParams, SamplingParamsError, with_fields


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def test_without_the_file_nothing_shapes_the_distribution(tmp_path: Path) -> None:
    neutral = SamplingParams(temperature=1, top_p=1, top_k=0, min_p=0, typical_p=1, repetition_penalty=1)
    assert read_sampling_defaults(tmp_path) == neutral == SamplingParams()
    assert SamplingParams(temperature=0) == GREEDY


def test_what_the_model_has_is_taken_and_the_rest_stays_neutral(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True, "eos_token_id": 2}
    found = read_sampling_defaults(written(tmp_path, config))
    assert found == SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)
    assert read_sampling_defaults(written(tmp_path, {"min_p": 0.05, "typical_p": 0.9})) == SamplingParams(
        min_p=0.05, typical_p=0.9
    )


def test_null_is_absent_and_whole_numbers_are_numbers(tmp_path: Path) -> None:
    found = read_sampling_defaults(written(tmp_path, {"temperature": None, "top_p": 1, "top_k": 50, "typical_p": None}))
    assert found == SamplingParams(top_k=50)


def test_a_temperature_that_no_float_tells_from_greedy_is_the_least_one(tmp_path: Path) -> None:
    assert read_sampling_defaults(written(tmp_path, {"temperature": 1e-6})).temperature == 1e-3
    assert read_sampling_defaults(written(tmp_path, {"temperature": 0})).temperature == 0


@pytest.mark.parametrize(
    "config",
    [{"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"top_k": 1.5}, {"min_p": 1}, {"repetition_penalty": 11},
     {"repetition_penalty": "1.1"}, {"temperature": True}, {"temperature": float("nan")}],
    ids=str,
)  # fmt: skip
def test_a_value_that_no_request_may_have_is_refused_by_name(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError, match=next(iter(config))) as caught:
        read_sampling_defaults(written(tmp_path, config))
    assert caught.value.file == "generation_config.json"


@pytest.mark.parametrize(("name", "low", "high"), [("repetition_penalty", 0, 11), ("min_p", -1, 1), ("temperature", -1, 101)])
def test_a_bound_is_told_alike_on_both_sides(name: str, low: float, high: float) -> None:
    told = set()
    for value in (low, high):
        with pytest.raises(SamplingParamsError) as caught:
            with_fields(SamplingParams(), {name: value})
        told.add(caught.value.allowed)
    assert len(told) == 1
