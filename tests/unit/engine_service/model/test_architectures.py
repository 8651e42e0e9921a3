"""docs/models.md is true: every architecture, tiny and random, gives the library's logits, or is refused for that reason."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvkeeper.engine_service.compute.self_check import load_checked_model
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from kvkeeper.engine_service.model.config import is_native
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.kernels.cpu import compiled
from tests.support.models.architectures import MAX_POSITION, VOCAB_SIZE, build_architecture
from tests.support.models.tiny_models import NumericsCase, logits_of, random_tokens
from tests.unit.engine_service.model.test_numerics import HandTables

torch.set_num_threads(1)

PAGE = Path(__file__).parents[4] / "docs" / "models.md"

# Sections of the page. What the reason of a refusal says; None: the model is served.
SECTIONS = {
    "Native families": None,
    "Served through transformers": None,
    "Served up to a length": None,
    "Refused: recurrent states, or attention that is not replaceable": "the library's attention interface",
    "Refused: keys and values of different shapes": "of one shape",
    "Refused: attention sinks and other terms in the scores": "plain attention",
    "Refused: layers that attend more than once": "attend once",
    "Refused: attention that is not causal": "causal attention",
    "Refused: the forward pass needs masks, a cache, or a language": "flat batches without masks",
    "Refused: other logits than the library's": "logits on the paged cache",
}
NOT_OF_TYPES = {"Quantised weights"}  # sections of the page that name other things than model types
# What the library's own path says of native families that it cannot serve.
ONLY_NATIVE = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), "of one shape"),
    "gpt_oss": "plain attention",
}
LIMITED = {"phi3": 32, "llama4_text": 32}


def read_page() -> dict[str, list[str]]:
    """Model types by section: the names in lines that are a list of names, or the first of a table's row."""
    found: dict[str, list[str]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        if title in NOT_OF_TYPES:
            continue
        lists = re.findall(r"^`.*$", text, re.MULTILINE)
        found[title] = [name for line in lists for name in re.findall(r"`([^`]+)`", line)] + re.findall(
            r"^\| `([^`]+)`", text, re.MULTILINE
        )
    return found


@pytest.fixture(scope="module")
def both_kernels() -> list[object]:
    """Torch's, and the compiled ones where they are installed, as the switch holds them."""
    if not compiled.is_installed():
        return [None]
    compiled.switch(on=True)
    loaded = compiled._kernels
    compiled.switch(on=False)
    return [None, loaded]


TABLE = read_page()
PLACES = [(title, model_type) for title, members in TABLE.items() if title in SECTIONS for model_type in members]


def test_every_architecture_stands_on_the_page_once() -> None:
    assert set(TABLE) == {*SECTIONS, "Not tried"}
    assert sorted(name for members in TABLE.values() for name in members) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert all(members == sorted(members) for title, members in TABLE.items() if title != "Served up to a length")
    assert {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if is_native(name)} == set(TABLE["Native families"])


@pytest.mark.parametrize(("section", "model_type"), PLACES, ids=[model_type for _, model_type in PLACES])
@pytest.mark.filterwarnings("ignore")  # of the library's configs and of its slow paths
def test_an_architecture_is_what_the_page_says(
    section: str, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both_kernels: list[object]
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
    assert {model.config.max_position for model in models} == {LIMITED.get(model_type, MAX_POSITION)}
    lengths = (5, min(90, LIMITED.get(model_type, MAX_POSITION)))
    cases = [NumericsCase(random_tokens(length, vocab_size=VOCAB_SIZE)) for length in lengths]
    expected = logits_of(folder, cases)
    for kernels, model in itertools.product(both_kernels, models):
        monkeypatch.setattr(compiled, "_kernels", kernels)
        for ours, theirs in zip(HandTables(model, 4).compute(cases, 7), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
