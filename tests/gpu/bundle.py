"""`make gpu-bundle`: one folder to copy to a bare GPU host, with our wheel and all that the host lacks; it fetches nothing.

The host is taken to have Python 3.11 or 3.12 with its own torch, triton and numpy, which are left alone: they fit its driver.
`python -m tests.gpu.bundle install FOLDER TARGET`, run there, puts those of the wheels that fit into TARGET.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_BYTES = 60 << 20
_PYTHONS = ("3.11", "3.12")
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
_OF_THE_HOST = {"torch", "triton", "numpy"}
_CUDA_BINDINGS = "cuda-bindings==13.0.3"  # of the oldest driver that it is to meet; torch brings its own where it is installed
# What our dependencies need in turn: --no-deps keeps torch out, so they are named.
_FURTHER = (
    "googleapis-common-protos",
    "markupsafe",
    "pygments",
    "markdown-it-py",
    "mdurl",
    "typing-extensions",
    "cuda-pathfinder",
)


def build(folder: Path) -> None:
    """Fill the folder. Raises SystemExit where it comes to more than MOST_BYTES."""
    from tqdm import tqdm  # which a bare host does not have

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    for version in _PYTHONS:
        for requirement in tqdm(_requirements(), desc=f"wheels for Python {version}", file=sys.stderr):
            _pip("download", "--no-deps", "--only-binary=:all:", "--python-version", version, "--implementation", "cp",
                 *(word for platform in _PLATFORMS for word in ("--platform", platform)),
                 "-c", str(ROOT / "constraints.txt"), "--dest", str(folder), requirement)  # fmt: skip
    num_bytes = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {num_bytes / (1 << 20):.1f} MiB")
    if num_bytes > MOST_BYTES:
        raise SystemExit(f"more than {MOST_BYTES >> 20} MiB")


def install(folder: Path, target: Path) -> None:
    """Those wheels that fit this Python, beside what it has."""
    with tempfile.TemporaryDirectory() as links:
        names = {wheel.name.split("-")[0].lower().replace("_", "-") for wheel in folder.glob("*.whl")}
        for wheel in folder.glob("*.whl"):
            (Path(links) / wheel.name).symlink_to(wheel.resolve())
        _pip("install", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--find-links", links,
             "--target", str(target), *sorted(names))  # fmt: skip


def _requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["engine"], _CUDA_BINDINGS, *_FURTHER]
    names = [text.split(";")[0].strip() for text in asked]
    return [name for name in names if not any(name.startswith(own) for own in _OF_THE_HOST)]


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments], check=False)
    if done.returncode:
        raise SystemExit(f"pip {arguments[0]} failed")


if __name__ == "__main__":
    if sys.argv[1:2] == ["install"]:
        install(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        build(Path(sys.argv[1]))
