"""The table behind docs/operate/models.md: an architecture, tiny and random, has the library's logits or is refused."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeeper.engine_service.compute.self_check import load_checked_model
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from kvkeeper.engine_service.model.checkpoint.text_part import read_text_config
from kvkeeper.engine_service.model.config import is_native
from kvkeeper.engine_service.model.families.table import FAMILIES
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.kernels.cpu import compiled
from tests.support.models.architectures import MAX_POSITION, VOCAB_SIZE, build_architecture
from tests.support.models.tiny_models import NumericsCase, logits_of, random_tokens
from tests.support.slices import todays
from tests.unit.engine_service.model.test_numerics import HandTables
from tests.unit.engine_service.model.verdicts import (
    NATIVE_PART,
    NOT_TRIED,
    PART_BY_LIBRARY,
    SECTIONS,
    TABLE_FILE,
    all_types,
    build_text_part,
    load,
    read_table,
    wrap_as,
    wrappers,
)

torch.set_num_threads(1)

# What the library's own path says of native families that it cannot serve.
ONLY_NATIVE = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), "of one shape"),
    "gemma4_text": "of one shape",
    "gemma4_unified_text": "of one shape",
    "gpt_oss": "plain attention",
    **dict.fromkeys(
        ("bailing_hybrid", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        "a state of their own",
    ),
}
LIMITED = {"phi3": 32}  # whichever side computes it
LIBRARY_LIMITED = {"llama4_text": 32}  # through the library alone


@pytest.fixture
def both_kernels() -> Iterator[list[bool]]:
    """Torch's, and the compiled ones where they are installed: whether these are on."""
    yield [False, True] if compiled.is_installed() else [False]
    compiled.switch(on=False)


TABLE = read_table()
OF_WRAPPERS = (NATIVE_PART, PART_BY_LIBRARY)
PLACES = [(section, model_type) for model_type, section in TABLE.items() if section != NOT_TRIED]
TODAYS = todays(PLACES, len(PLACES) // 3)


def test_every_architecture_stands_in_the_table() -> None:
    assert set(TABLE.values()) == {*SECTIONS, NOT_TRIED}
    assert list(TABLE) == all_types()
    said_twice = json.loads(TABLE_FILE.read_text()).keys() & FAMILIES.keys()
    assert said_twice == set(), "a native family needs no verdict"


@pytest.mark.parametrize(("section", "model_type"), TODAYS, ids=[model_type for _, model_type in TODAYS])
@pytest.mark.filterwarnings("ignore")  # of the library's configs and of its slow paths
def test_an_architecture_is_what_the_table_says(
    section: str, model_type: str, tmp_path: Path, both_kernels: list[bool]
) -> None:
    if section in OF_WRAPPERS or model_type in wrappers():
        check_text_part(section, model_type, tmp_path, both_kernels)
        return
    folder = build_architecture(model_type, tmp_path)
    if (reason := SECTIONS[section]) is not None:
        with pytest.raises(UnsupportedModelError, match=reason):
            load_checked_model(folder, model_type, "float32", device=torch.device("cpu"), progress=False)
        return
    models: list[Any] = [load_model(folder, progress=False)[0]] if is_native(model_type) else []
    if model_type in ONLY_NATIVE:
        with pytest.raises(UnsupportedModelError, match=ONLY_NATIVE[model_type]):
            load_checked_model(folder, model_type, "float32", device=torch.device("cpu"), progress=False)
    else:
        models.append(load_checked_model(folder, model_type, "float32", device=torch.device("cpu"), progress=False))
    limits = [LIMITED.get(model_type, MAX_POSITION)] * len(models)
    if model_type in LIBRARY_LIMITED:
        limits[-1] = LIBRARY_LIMITED[model_type]
    assert [model.config.max_position for model in models] == limits
    lengths = sorted({5, *(min(90, limit) for limit in limits)})
    cases = [NumericsCase(random_tokens(length, vocab_size=VOCAB_SIZE)) for length in lengths]
    expected = logits_of(folder, cases)
    for is_compiled, (model, limit) in itertools.product(both_kernels, zip(models, limits, strict=True)):
        compiled.switch(on=is_compiled)
        fitting = [case for case in cases if len(case.tokens) <= limit]
        for ours, theirs in zip(HandTables(model, 4).compute(fitting, 7), expected, strict=False):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def check_text_part(section: str, model_type: str, folder: Path, both_kernels: list[bool]) -> None:
    """Wrapped, a text model has the logits that the library gives it alone, or is refused."""
    text_type = build_text_part(model_type, folder)
    case = NumericsCase(random_tokens(30, vocab_size=VOCAB_SIZE))
    expected = logits_of(folder, [case]) if section in OF_WRAPPERS else None
    wrap_as(model_type, text_type, folder)
    if expected is None:
        with pytest.raises(UnsupportedModelError, match=SECTIONS[section]):
            load(folder)
        return
    model = load(folder)
    assert is_native(read_text_config(folder)["model_type"]) == (section == NATIVE_PART)
    for is_compiled in both_kernels:
        compiled.switch(on=is_compiled)
        (found,) = HandTables(model, 4).compute([case], 7)
        torch.testing.assert_close(found, expected[0], atol=1e-5, rtol=0)
