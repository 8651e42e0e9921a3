"""What becomes of each architecture that transformers knows: native, through the library, or refused, and by which words.

Native families are those of FAMILIES. Of all others the file beside this one has the verdict:
`python -m tests.unit.engine_service.model.verdicts > tests/unit/engine_service/model/verdicts.json` writes it anew, from
tiny random models; the test beside it holds it to what comes of them, and `make docs` writes it into docs/operate/models.md.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvkeeper.engine_service.compute.self_check import load_checked_model
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from kvkeeper.engine_service.model.families.table import FAMILIES
from tests.support.models.architectures import build_architecture

NATIVE = "Native families"
TABLE_FILE = Path(__file__).with_name("verdicts.json")

# By section of docs/operate/models.md what the reason of a refusal says; None: the model is served.
SECTIONS: Mapping[str, str | None] = {
    NATIVE: None,
    "Served through transformers": None,
    "Refused: recurrent states, or attention that is not replaceable": "the library's attention interface",
    "Refused: keys and values of different shapes": "of one shape",
    "Refused: attention sinks and other terms in the scores": "plain attention",
    "Refused: layers that attend more than once": "attend once",
    "Refused: attention that is not causal": "causal attention",
    "Refused: the forward pass needs masks, a cache, or a language": "flat batches without masks",
    "Refused: other logits than the library's": "logits on the paged cache",
}
NOT_TRIED = "Not tried"


def read_table() -> dict[str, str]:
    """The section of each model type."""
    found: dict[str, str] = json.loads(TABLE_FILE.read_text())
    return dict(sorted({**found, **dict.fromkeys(FAMILIES, NATIVE)}.items()))


def section_of(model_type: str, folder: Path) -> str:
    """What becomes of a tiny random model of this type, which is not native, built in an empty folder."""
    try:
        build_architecture(model_type, folder)
    except Exception:  # whatever the library makes of a config that is none of its own
        return NOT_TRIED
    try:
        load_checked_model(folder, model_type, "float32", device=torch.device("cpu"), progress=False)
    except UnsupportedModelError as error:
        return next(section for section, reason in SECTIONS.items() if reason is not None and reason in str(error))
    return "Served through transformers"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - FAMILIES.keys()):
        with tempfile.TemporaryDirectory() as folder:
            found[model_type] = section_of(model_type, Path(folder))
        print(model_type, found[model_type], file=sys.stderr)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
