"""What a model is called, by itself and by clients."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvkeeper.common.service.settings import ConfigError
from kvkeeper.engine_service.cache_session.kv_spec import make_kv_spec
from kvkeeper.engine_service.compute.served_model import load_served_model, own_name
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig

HASH = "5" * 40


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("llama", "llama"),
        (f"models--meta--Llama-3/snapshots/{HASH}", "meta/Llama-3"),
        (f"models--gpt2/snapshots/{HASH}", "gpt2"),
        (f"others/snapshots/{HASH}", HASH),
        (f"models--meta--Llama-3/blobs/{HASH}", HASH),
    ],
)
def test_a_model_is_called_by_its_folder_or_its_repository(tmp_path: Path, folder: str, name: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    assert own_name(tmp_path / folder) == name
    (tmp_path / "link").symlink_to(tmp_path / folder)
    assert own_name(tmp_path / "link") == name


def test_what_clients_call_it_says_nothing_of_what_is_cached() -> None:
    model = load_served_model(EngineConfig(model=HASH_TOY))
    renamed = replace(model, served_as="acme/toy")
    assert (model.name, renamed.name) == (HASH_TOY, "acme/toy")
    assert make_kv_spec(renamed, 4) == make_kv_spec(model, 4)


@pytest.mark.parametrize("name", ["a b", "a\nb", "\x1b[31m", "x" * 129, " "])
def test_a_name_that_no_line_could_show_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--model-name"):
        EngineConfig(model_name=name)
    assert EngineConfig(model_name="acme/Modell-3.1_Ü").model_name
