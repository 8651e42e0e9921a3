"""The table behind docs/operate/models.md: an architecture, tiny and random, has the library's logits or is refused."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvkeeper.engine_service.compute.self_check import load_checked_model
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from kvkeeper.engine_service.model.config import is_native
from kvkeeper.engine_service.model.families.table import FAMILIES
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.kernels.cpu import compiled
from tests.support.models.architectures import MAX_POSITION, VOCAB_SIZE, build_architecture
from tests.support.models.tiny_models import NumericsCase, logits_of, random_tokens
from tests.support.slices import todays
from tests.unit.engine_service.model.test_numerics import HandTables
from tests.unit.engine_service.model.verdicts import NOT_TRIED, SECTIONS, TABLE_FILE, read_table

torch.set_num_threads(1)

# What the library's own path says of native families that it cannot serve.
ONLY_NATIVE = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), "of one shape"),
    "gemma4_text": "of one shape",
    "gemma4_unified_text": "of one shape",
    "gpt_oss": "plain attention",
    "qwen3_next": "the library's attention interface",
}
LIMITED = {"phi3": 32}  # whichever side computes it
LIBRARY_LIMITED = {"llama4_text": 32}  # through the library alone


@pytest.fixture
def both_kernels() -> Iterator[list[bool]]:
    """Torch's, and the compiled ones where they are installed: whether these are on."""
    yield [False, True] if compiled.is_installed() else [False]
    compiled.switch(on=False)


TABLE = read_table()
PLACES = [(section, model_type) for model_type, section in TABLE.items() if section != NOT_TRIED]
TODAYS = todays(PLACES, len(PLACES) // 3)


def test_every_architecture_stands_in_the_table() -> None:
    assert set(TABLE.values()) == {*SECTIONS, NOT_TRIED}
    assert list(TABLE) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    said_twice = json.loads(TABLE_FILE.read_text()).keys() & FAMILIES.keys()
    assert said_twice == set(), "a native family needs no verdict"


@pytest.mark.parametrize(("section", "model_type"), TODAYS, ids=[model_type for _, model_type in TODAYS])
@pytest.mark.filterwarnings("ignore")  # of the library's configs and of its slow paths
def test_an_architecture_is_what_the_table_says(
    section: str, model_type: str, tmp_path: Path, both_kernels: list[bool]
) -> None:
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
