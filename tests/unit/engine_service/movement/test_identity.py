"""What engines compare before they share requests."""

from pathlib import Path

import pytest

from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.movement.messages import identity, require_same
from kvkeeper.engine_service.values.errors import ForeignEngine
from tests.support.models.tiny_models import build_model_folder, tiny_model


def test_what_k_and_v_are_stored_in_is_part_of_it(tmp_path: Path) -> None:
    folder = str(build_model_folder(tmp_path, tiny_model("qwen3")))

    def load(kv_dtype: str, kv_tail_tokens: int = 0) -> ServedModel:
        config = EngineConfig(
            model=folder, dtype="float32", kv_dtype=kv_dtype, kv_tail_tokens=kv_tail_tokens, cpu_kernels="torch"
        )
        return load_served_model(config)

    models = [load("auto"), load("int8"), load("int8", 64), load("int8", 128), load("bf16")]
    for model in models:
        require_same(model, identity(model))
        for other in models:
            if other is not model:
                with pytest.raises(ForeignEngine, match="kv_format"):
                    require_same(model, identity(other))
    require_same(models[0], identity(load("auto", 64)))  # a tail that nothing is stored without
