"""What is made once and kept: the environment of `make vllm-check`, a folder of npm's with gguf in it, and the models.

vLLM keeps what it has compiled by the path of the model, so that its second start is faster.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.llama import build_folder
from tests.vllm_check.__main__ import Failed, make_environment

NODE_LLAMA_CPP = "3.22.1"
GGUF = "0.19.0"

__all__ = ["Failed", "llama_cpp", "model", "vllm"]


def model(folder: Path, size: str) -> Path:
    """The folder of a model of llama.py."""
    made, unfinished = folder / size, folder / f"{size}-unfinished"
    if not made.exists():
        unfinished.mkdir(parents=True, exist_ok=True)
        build_folder(unfinished, size)
        unfinished.rename(made)
    return made


def vllm(folder: Path) -> Path:
    """Its interpreter. Raises Failed."""
    return make_environment(folder)


def llama_cpp(folder: Path) -> Path:
    """The folder, which has node-llama-cpp with its binaries for this machine, and gguf. Raises Failed."""
    done = folder / f"node-llama-cpp-{NODE_LLAMA_CPP}"
    if done.exists():
        return folder
    if shutil.which("npm") is None:
        raise Failed("llama.cpp is had from npm, which is not installed")
    packages = [f"node-llama-cpp@{NODE_LLAMA_CPP}", f"@node-llama-cpp/linux-x64@{NODE_LLAMA_CPP}"]
    # Optional packages are its binaries for devices and for other machines.
    options = ("--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund", "--silent")
    npm = ["npm", "install", "--prefix", str(folder), *options, *packages]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "python"), f"gguf=={GGUF}"]
    folder.mkdir(parents=True, exist_ok=True)
    for command in (npm, pip):
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise Failed(f"the environment of llama.cpp cannot be made: {' '.join(command)} failed")
    done.touch()
    return folder
