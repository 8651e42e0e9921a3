"""What an engine refuses before it imports torch: folders that hold no model, and models that the machine has no memory for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvkeeper.common.service import memory_limit
from kvkeeper.common.service.process import StartError
from kvkeeper.engine_service import preflight
from kvkeeper.engine_service.config import SOURCE, EngineConfig
from kvkeeper.engine_service.model.checkpoint.safetensors_files import list_weight_files, tensor_sizes
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.preflight import ModelMemory, check_start, model_memory, needed_bytes

MIB = 1 << 20
NUM_ELEMENTS = sum(each.num_elements for each in tensor_sizes(list_weight_files(DEMO_MODEL_DIR)))


def config_of(model: Path | str, **options: object) -> EngineConfig:
    return EngineConfig(model=str(model), listen="127.0.0.1:0", **options)  # type: ignore[arg-type]


def refusal(config: EngineConfig) -> str:
    with pytest.raises(StartError) as refused:
        check_start(config)
    return str(refused.value)


def test_the_demo_model_is_right() -> None:
    check_start(config_of(DEMO_MODEL_DIR))
    check_start(config_of("hash-toy"))


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        ("absent", None, "there is no such folder; nothing is downloaded"),
        (
            "m.gguf",
            "GGUF",
            "a GGUF file; a Hugging Face folder is wanted, with config.json and *.safetensors: kvkeeper convert",
        ),
        ("m.bin", "", "a file; a Hugging Face folder is wanted"),
        ("m", {"m-q4.gguf": "GGUF"}, "the folder has GGUF files; a Hugging Face folder is wanted"),
        ("m", {}, "the folder has no config.json; a Hugging Face folder is wanted"),
        ("m", {"config.json": "{"}, "config.json: is not JSON"),
        ("m", {"config.json": "{}"}, "model type None is not supported: config.json has none; supported: a config.json with"),
        (
            "m",
            {"config.json": json.dumps({"architectures": ["DeepseekV3ForCausalLM"]})},
            'for the architecture \'DeepseekV3ForCausalLM\'; supported: a config.json with "model_type": "deepseek_v3"',
        ),
        ("m", {"config.json": json.dumps({"architectures": ["FalconForCausalLM"]})}, "with the family's model_type"),
        ("m", {"config.json": POINTER}, "config.json: is a pointer of git-lfs, not the file itself; `git lfs pull`"),
        (
            "m",
            {"config.json": (DEMO_MODEL_DIR / "config.json").read_text(), "model.safetensors": POINTER},
            "model.safetensors: is a pointer of git-lfs, not the file itself; `git lfs pull`",
        ),
        ("hub", {"models--a--b/snapshots/0a1b/config.json": "{}"}, "/hub/models--a--b"),
        ("m", {"config.json": (DEMO_MODEL_DIR / "config.json").read_text()}, "model.safetensors does not exist"),
    ],
)
def test_what_is_no_model_folder_is_told_as_what_it_is(
    tmp_path: Path, name: str, files: dict[str, str] | str | None, said: str
) -> None:
    path = tmp_path / name
    if isinstance(files, dict):
        path.mkdir()
        for file, text in files.items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_text(text)
    elif files is not None:
        path.write_text(files)
    line = refusal(config_of(path))
    assert line.startswith(f"--model {path}: ")
    assert said in line
    line = refusal(config_of("hash-toy", speculation="draft-model", draft_model=str(path)))
    assert line.startswith(f"--draft-model {path}: ")


@pytest.mark.parametrize(
    ("model", "said"),
    [("org/Name-1.5B", "; for a model of a hub: hf download org/Name-1.5B --local-dir Name-1.5B"), ("absent", "this machine")],
)
def test_the_name_of_a_model_on_a_hub_is_told_how_to_get(model: str, said: str) -> None:
    assert refusal(config_of(Path(model))).endswith(said)


@pytest.mark.parametrize("flag", ["model", "draft-model"])
def test_the_cache_of_a_hub_stands_for_its_newest_snapshot(flag: str, tmp_path: Path) -> None:
    for age, snapshot in enumerate(("0c", "0a", "0b")):
        folder = tmp_path / "snapshots" / snapshot
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        os.utime(folder, (2_000_000_000 - age, 2_000_000_000 - age))
    speculation = ("--speculation", "draft-model") if flag == "draft-model" else ()
    config = SOURCE.load((f"--{flag}", str(tmp_path), *speculation), {})
    assert getattr(config, flag.replace("-", "_")) == str(tmp_path / "snapshots" / "0c")


def test_a_model_that_does_not_fit_is_refused_with_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(DEMO_MODEL_DIR)
    needed = needed_bytes(config, model_memory(config))
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: needed)
    check_start(config)
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: needed - MIB)
    line = refusal(config)
    assert line.startswith(f"--model {DEMO_MODEL_DIR}: its weights take ")
    for part in ("MiB in float32", "are wanted", "are available", "; with --dtype bfloat16 they take "):
        assert part in line
    check_start(config_of(DEMO_MODEL_DIR, dtype="bfloat16"))


def test_the_first_dtype_that_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    weights = {"auto": 32, "bfloat16": 16, "int8": 10, "int4": 7}
    monkeypatch.setattr(preflight, "model_memory", lambda config: ModelMemory(weights[config.dtype] << 30, 0, config.dtype))
    config = config_of(DEMO_MODEL_DIR)
    for available, named in ((17, "bfloat16"), (15, "int8"), (9, "int4"), (6, "")):
        monkeypatch.setattr(memory_limit, "available_bytes", lambda available=available: available << 30)
        found = refusal(config).partition("; with --dtype ")[2]
        assert found == (f"{named} they take {weights[named]} GiB" if named else "")
        on_torch = refusal(config_of(DEMO_MODEL_DIR, cpu_kernels="torch"))
        assert ("; with --dtype" in on_torch) == (named == "bfloat16")


def test_the_weights_count_in_the_dtype_that_is_computed_in() -> None:
    assert model_memory(config_of(DEMO_MODEL_DIR)).weights == NUM_ELEMENTS * 4
    assert model_memory(config_of(DEMO_MODEL_DIR, dtype="bfloat16")).weights == NUM_ELEMENTS * 2
    both = config_of(DEMO_MODEL_DIR, speculation="draft-model", draft_model=str(DEMO_MODEL_DIR))
    assert model_memory(both).weights == NUM_ELEMENTS * 8
    on_device = config_of(DEMO_MODEL_DIR, device="cuda")
    assert needed_bytes(on_device, model_memory(on_device)) < needed_bytes(config_of(DEMO_MODEL_DIR), model_memory(both))


def test_all_shards_count(tmp_path: Path) -> None:
    raw = json.loads((DEMO_MODEL_DIR / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shards = {f"{name}.safetensors": {name: np.zeros((3, size), np.float16)} for name, size in (("a", 5), ("b", 7))}
    for file, tensors in shards.items():
        save_file(tensors, tmp_path / file)
    index = {"weight_map": {name: file for file, tensors in shards.items() for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    memory = model_memory(config_of(tmp_path))
    assert (memory.weights, memory.beside) == (3 * (5 + 7) * 4, 3 * 7 * 2)


def test_a_device_that_is_not_there_is_not_blamed_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_GPU_FILES", ())
    assert refusal(config_of(DEMO_MODEL_DIR, device="cuda")) == "--device cuda: this machine has no NVIDIA device"


def test_nothing_of_it_imports_torch() -> None:
    code = (
        "import sys; from kvkeeper.engine_service.__main__ import main;"
        f" assert main(['--listen', '127.0.0.1:0', '--model', {str(DEMO_MODEL_DIR)!r}, '--draft-model', '/nope',"
        " '--speculation', 'draft-model']) == 1; print('torch' in sys.modules, 'grpc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False False\n"
    assert done.stderr.startswith("kvkeeper engine: --draft-model /nope: ")
