"""The values that apply where a request leaves a sampling field out: the model's generation_config.json, or else nothing.

The fields read are those of a request that shape the distribution. As in vLLM, `do_sample` and the lengths of that file are not
read, and its repetition_penalty applies at any temperature: a request that wants none sends 1.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..model.checkpoint.errors import ModelConfigError
from ..model.checkpoint.json_file import read_json_object
from ..values.sampling_params import NEUTRAL, SamplingParams, SamplingParamsError

_FILE: Final = "generation_config.json"
_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
_LEAST_TEMPERATURE: Final = 1e-3  # below it the distribution is the likeliest token to float precision


def read_sampling_defaults(folder: Path) -> SamplingParams:
    """Read the sampling defaults of a model folder. Raises ModelConfigError for a value that no request may have."""
    path = folder / _FILE
    raw = read_json_object(path) if path.is_file() else {}
    given = {name: value for name in _FIELDS if (value := raw.get(name)) is not None}
    for name, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelConfigError(_FILE, f"{name} must be a number, is {value!r}")
    try:
        return with_fields(NEUTRAL, given)
    except SamplingParamsError as error:
        raise ModelConfigError(_FILE, str(error)) from None


def with_fields(defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    """The defaults but for what is given, in the bounds of a request. Raises SamplingParamsError."""
    if 0 < given.get("temperature", 0) < _LEAST_TEMPERATURE:
        given = {**given, "temperature": _LEAST_TEMPERATURE}
    if not 0 <= given.get("min_p", 0) < 1:
        raise SamplingParamsError("min_p", given["min_p"], "0 to below 1")
    return replace(defaults, **given)
