"""What becomes of each architecture that transformers knows: native, through the library, or refused, and by which words.

Native families are those of FAMILIES. Of all others the file beside this one has the verdict, and of types that wrap a text
model: `python -m tests.unit.engine_service.model.verdicts > tests/unit/engine_service/model/verdicts.json` writes it anew, from
tiny random models; the test beside it holds it to what comes of them, and `make docs` writes it into docs/operate/models.md.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from kvkeeper.engine_service.compute.self_check import load_checked_model
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError, WeightsError
from kvkeeper.engine_service.model.checkpoint.text_part import read_text_config
from kvkeeper.engine_service.model.config import is_native
from kvkeeper.engine_service.model.families.table import FAMILIES
from kvkeeper.engine_service.model.loader import load_model
from tests.support.models.architectures import build_architecture
from tests.support.models.wrapped import wrap

NATIVE = "Native families"
BY_LIBRARY = "Served through transformers"
NATIVE_PART, PART_BY_LIBRARY = "Text parts of native families", "Text parts served through transformers"
TABLE_FILE = Path(__file__).with_name("verdicts.json")

# By section of docs/operate/models.md what the reason of a refusal says, the first that does; None: the model is served.
SECTIONS: Mapping[str, str | None] = {
    NATIVE: None,
    NATIVE_PART: None,
    BY_LIBRARY: None,
    PART_BY_LIBRARY: None,
    "Refused: an index chooses what is read": "by an index of its own",
    "Refused: recurrent states": "a state of their own for each sequence",
    "Refused: a bias by distance": "ALiBi",
    "Refused: attention that is not replaceable": "attention is code of its own",
    "Refused: keys and values of different shapes": "of one shape",
    "Refused: attention sinks and other terms in the scores": "plain attention",
    "Refused: layers that attend more than once": "attend once",
    "Refused: attention that is not causal": "causal attention",
    "Refused: no text model by itself": "decoder-only language models",
    "Refused: the forward pass needs masks, a cache, or a language": "flat batches without masks",
    "Refused: other logits than the library's": "logits on the paged cache",
}
NOT_TRIED = "Not tried"


def wrappers() -> frozenset[str]:
    """Types of the library that have a text model inside."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys()
    return frozenset(name for name in names if "text_config" in getattr(CONFIG_MAPPING[name], "sub_configs", {}))


def all_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | wrappers())


def read_table() -> dict[str, str]:
    """The section of each model type."""
    found: dict[str, str] = json.loads(TABLE_FILE.read_text())
    return dict(sorted({**found, **dict.fromkeys(FAMILIES, NATIVE)}.items()))


def build_text_part(model_type: str, folder: Path) -> str:
    """Write what a text part of this type is by itself, in an empty folder; its config alone, where the library has no class.

    Returns the type that stands in its config.
    """
    text_type = str(CONFIG_MAPPING[model_type]().text_config.model_type)
    raw: dict[str, Any] = {"text_config": {"model_type": text_type}, "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(raw))
    own_type = read_text_config(folder)["model_type"]
    if own_type in CONFIG_MAPPING and CONFIG_MAPPING[own_type] in MODEL_FOR_CAUSAL_LM_MAPPING:
        build_architecture(own_type, folder)
    return text_type


def wrap_as(model_type: str, text_type: str, folder: Path) -> None:
    """Rewrite what build_text_part wrote as a model of this type."""
    path = folder / "config.json"
    if (folder / "model.safetensors").exists():
        wrap(folder, wrapper=model_type)
    raw = json.loads(path.read_text())
    raw["text_config"]["model_type"] = text_type
    path.write_text(json.dumps(raw))


def load(folder: Path) -> Any:
    """The model in a folder as it is served. Raises UnsupportedModelError."""
    own_type = read_text_config(folder)["model_type"]
    if is_native(own_type):
        return load_model(folder, progress=False)[0]
    return load_checked_model(folder, own_type, "float32", device=torch.device("cpu"), progress=False)


def section_of(model_type: str, folder: Path) -> str:
    """What becomes of a tiny random model of this type, which is not native, built in an empty folder."""
    is_wrapper = model_type in wrappers()
    try:
        if is_wrapper:
            wrap_as(model_type, build_text_part(model_type, folder), folder)
        else:
            build_architecture(model_type, folder)
    except Exception:  # whatever the library makes of a config that is none of its own
        return NOT_TRIED
    try:
        load(folder)
    except UnsupportedModelError as error:
        return next(section for section, reason in SECTIONS.items() if reason is not None and reason in str(error))
    except WeightsError:  # the library does not read what it wrote
        return NOT_TRIED
    if not is_wrapper:
        return BY_LIBRARY
    return NATIVE_PART if is_native(read_text_config(folder)["model_type"]) else PART_BY_LIBRARY


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for model_type in sorted(set(all_types()) - FAMILIES.keys()):
        with tempfile.TemporaryDirectory() as folder:
            found[model_type] = section_of(model_type, Path(folder))
        print(model_type, found[model_type], file=sys.stderr)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
