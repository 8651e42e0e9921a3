"""What a worker refuses for its time or memory is told with the limit, and with the setting that has it."""

import pytest

from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.outputs.model_text import ModelText
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from kvkeeper.engine_service.text_workers.text_work import TextWork
from kvkeeper.engine_service.text_workers.text_worker import Limits
from kvkeeper.engine_service.values.errors import TooComplex
from kvkeeper.engine_service.values.input_limits import InputLimits

MANY = 1 << 20  # tokens


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (Limits(0.02, 512 << 20), {"exceeded": "time", "limit": "0.02", "flag": "--text-seconds"}),
        (Limits(20.0, 4 << 20), {"exceeded": "memory", "limit": str(4 << 20), "flag": "--text-memory"}),
    ],
    ids=["time", "memory"],
)
async def test_a_limit_of_the_workers_is_named(limits: Limits, told: dict[str, str]) -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL_DIR)
    work = TextWork(ModelText(tokenizer), tokenizer.vocab_size, 1, limits, InputLimits(), 8)
    try:
        with pytest.raises(TooComplex) as refused:
            await work.encode("a", "def main():\n    return 'a text that is long'\n" * 20_000, "text", MANY)
    finally:
        await work.close()
    assert refused.value.metadata == {"field": "text", **told}
