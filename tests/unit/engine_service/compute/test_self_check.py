"""The comparison at load: it refuses a model that would be wrong, for any reason, and limits lengths it could not try."""

from pathlib import Path

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file

from kvkeeper.engine_service.compute import self_check
from kvkeeper.engine_service.model import transformers_model
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError, WeightsError
from kvkeeper.engine_service.model.transformers_model import TransformersModel
from tests.support.models.architectures import MAX_POSITION, build_architecture
from tests.support.models.tiny_models import NumericsCase, logits_of, random_tokens
from tests.unit.engine_service.model.test_numerics import HandTables

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's slow paths


def load_in_process(folder: Path, model_type: str, dtype: str = "float32") -> TransformersModel:
    return self_check.load_checked_model(folder, model_type, dtype, device=torch.device("cpu"), progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("model_type", ["phi3", "llama4_text"])
def test_a_model_that_changes_at_a_length_is_refused_where_the_length_is_not_kept(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longrope and chunks: the library's logits differ from ours beyond 32 tokens, so the engine takes 32 at most."""
    folder = build_architecture(model_type, tmp_path)
    with structlog.testing.capture_logs() as logs:
        assert load_in_process(folder, model_type).config.max_position == 32
    (limited,) = [line for line in logs if line["event"] == "model_length_limited"]
    assert (limited["max_len"], limited["config_says"]) == (32, MAX_POSITION)
    monkeypatch.setattr(transformers_model, "_horizons", lambda network, config: iter(()))
    with pytest.raises(UnsupportedModelError, match="logits on the paged cache"):
        load_in_process(folder, model_type)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_was_compared_is_told(dtype: str, tmp_path: Path) -> None:
    folder = build_architecture("mixtral", tmp_path)
    with structlog.testing.capture_logs() as logs:
        load_in_process(folder, "mixtral", dtype)
    assert [line["event"] for line in logs] == ["model_check_started", "model_checked"]
    assert logs[1]["prompt_lens"] == [13, MAX_POSITION]
    assert 0 < logs[1]["relative_error"] < logs[1]["tolerance"]
    assert logs[1]["duration_s"] >= 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("damage", ["a lost token", "values of the token before", "twice the scale"])
def test_a_fault_of_ours_is_caught(damage: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_architecture("mixtral", tmp_path)
    attend = transformers_model.attend

    def faulty(q, k, v, kv_layer, metadata, scale, window, soft_cap):
        if damage == "a lost token":
            k, v = k.clone(), v.clone()
            k[-1], v[-1] = 0, 0
        elif damage == "values of the token before":
            v = v.roll(1, 0)
        else:
            scale = 2 * scale
        return attend(q, k, v, kv_layer, metadata, scale, window, soft_cap)

    monkeypatch.setattr(transformers_model, "attend", faulty)
    with pytest.raises(UnsupportedModelError, match="logits on the paged cache"):
        load_in_process(folder, "mixtral", dtype)


def test_a_model_too_large_to_be_tried_is_served_as_far_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OLMoE tells attention of a window that the library does not keep to: beyond it we would be wrong."""
    folder = build_architecture("olmoe", tmp_path, sliding_window=64)
    with pytest.raises(UnsupportedModelError, match="logits on the paged cache"):
        load_in_process(folder, "olmoe")
    monkeypatch.setattr(self_check, "_MOST_FLOPS", {"cpu": 1.0})
    with structlog.testing.capture_logs() as logs:
        model = load_in_process(folder, "olmoe")
    assert model.config.max_position == 64
    assert "model_length_limited" in [line["event"] for line in logs]
    case = NumericsCase(random_tokens(64, vocab_size=model.config.vocab_size))
    (found,) = HandTables(model, 4).compute([case], 7)
    torch.testing.assert_close(found, logits_of(folder, [case])[0], atol=1e-5, rtol=0)


def test_weights_that_the_library_would_make_up_are_missed(tmp_path: Path) -> None:
    folder = build_architecture("olmo2", tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "up_proj" in name)
    save_file({key: value for key, value in tensors.items() if key != name}, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=f"missing.*{name}"):
        load_in_process(folder, "olmo2")


@pytest.mark.parametrize(
    ("model_type", "reason"), [("xmod", "masks; this one stops with ValueError"), ("falcon", "attention interface")]
)
def test_a_model_that_cannot_run_is_refused_with_a_sentence(model_type: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load_in_process(build_architecture(model_type, tmp_path), model_type)
