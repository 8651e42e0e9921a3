"""A GGUF file as a Hugging Face folder: transformers reads it, widens its weights, and writes what an engine loads.

The folder appears whole or not at all.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from kvkeeper.common.service.extras import install_command, missing

_MODULES = ("gguf", "transformers", "accelerate", "torch")


class ConversionError(Exception):
    """The file was not converted. The text says why, in one line."""


def check_installed() -> None:
    """Raises ConversionError where the extra `gguf` is not installed."""
    if names := missing(*_MODULES):
        text = f"converting a GGUF file needs {', '.join(names)}, which are not installed"
        raise ConversionError(f"{text}; install them with: {install_command('gguf')}")


def convert(file: Path, folder: Path, sampling: Mapping[str, float] = MappingProxyType({})) -> None:
    """Writes the model, its tokenizer and its chat template to the folder, weights in bfloat16. Bars of progress go to stderr.

    sampling: fields of generation_config.json, which apply to requests that leave them out; a GGUF file has none.

    Raises ConversionError: the extra `gguf` is not installed, the file is none that transformers reads, or the folder exists or
    cannot be written.
    """
    check_installed()
    if folder.exists():
        raise ConversionError(f"{folder} exists already")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as partial:
            written = Path(partial) / folder.name
            _write(file, written, sampling)
            (written / "model.safetensors").chmod(0o644)  # the library's mode is for one user
            written.rename(folder)
    except OSError as error:
        raise ConversionError(f"{file}: {error.strerror or error}") from None


def _write(file: Path, folder: Path, sampling: Mapping[str, float]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from kvkeeper.cli.models.gguf_tokenizer import UnknownSplit, correct

    if not file.is_file():
        raise ConversionError(f"{file}: there is no such file")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        correct(tokenizer.backend_tokenizer, file)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    except UnknownSplit as error:
        raise ConversionError(f"{file}: {error}") from None
    except (ValueError, KeyError, IndexError, NotImplementedError, RuntimeError) as error:  # what the readers raise of a file
        raise ConversionError(f"{file}: transformers does not read it: {next(iter(str(error).splitlines()), '')}") from None
    model.generation_config.update(do_sample=bool(sampling), **sampling)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
