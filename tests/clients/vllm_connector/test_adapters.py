"""What names the adapter of a vLLM request: its content, as vLLM has read it."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvkeeper.vllm.adapters import Adapters


@dataclass
class Lora:
    lora_path: str
    lora_int_id: int = 1
    lora_name: str = "name"
    load_inplace: bool = False


def make(folder: Path, weights: bytes = b"weights", rank: int = 8) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def change(folder: Path, weights: bytes) -> None:
    """Also where the clock of the file system is coarse."""
    make(folder, weights)
    os.utime(folder / "adapter_model.safetensors", (1, 1))


def test_the_content_counts_and_no_name_or_place(tmp_path: Path) -> None:
    adapters = Adapters()
    one = adapters.digest(Lora(make(tmp_path / "one")))
    assert one is not None and len(one) == 64 and set(one) <= set("0123456789abcdef")
    assert adapters.digest(Lora(make(tmp_path / "same"), 2, "other")) == one
    assert adapters.digest(Lora(make(tmp_path / "weights", b"others"), 3)) not in (one, None)
    assert adapters.digest(Lora(make(tmp_path / "config", rank=16), 4)) not in (one, None)
    (tmp_path / "one" / "README.md").write_text("says nothing of the weights")
    assert Adapters().digest(Lora(str(tmp_path / "one"))) == one


def test_weights_that_changed_behind_vllm_are_not_known(tmp_path: Path) -> None:
    """vLLM may have the weights of before, or those of now if it had to read them again."""
    adapters, lora = Adapters(), Lora(make(tmp_path / "one"))
    before = adapters.digest(lora)
    change(tmp_path / "one", b"changed")
    assert adapters.digest(lora) is None
    now = adapters.digest(Lora(lora.lora_path, lora_int_id=2))
    assert now not in (before, None), "an adapter with another id was read now"


def test_one_that_is_loaded_in_place_is_read_again(tmp_path: Path) -> None:
    adapters, lora = Adapters(), Lora(make(tmp_path / "one"), load_inplace=True)
    before = adapters.digest(lora)
    assert adapters.digest(lora) == before
    change(tmp_path / "one", b"changed")
    assert adapters.digest(lora) not in (before, None)


@pytest.mark.parametrize("missing", ["folder", "adapter_config.json", "adapter_model.safetensors"])
def test_what_is_not_there_is_not_known(tmp_path: Path, missing: str) -> None:
    """An adapter of a model hub, for example."""
    folder = tmp_path / "one"
    if missing != "folder":
        make(folder)
        (folder / missing).unlink()
    assert Adapters().digest(Lora(str(folder))) is None
