"""`make gpu-bundle`: one folder to copy to a bare GPU host, with our wheel and all that the host lacks; it fetches nothing.

The bundle is for one version of Python. The host is taken to have it with its own torch, triton, numpy and cuda-bindings, which
torch brings; they are left alone, because they fit its driver. Our wheel goes without the demo model's weights, which no check
needs. `python tests/gpu/bundle.py install FOLDER TARGET`, run there, unpacks the wheels into TARGET; that needs no pip.
"""

import platform
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_BYTES = 20 << 20
PYTHON = "3.12"
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
_OF_THE_HOST = {"torch", "triton", "numpy"}
_LEFT_OUT = ".safetensors"
# What our dependencies need in turn: --no-deps keeps torch out, so they are named.
_FURTHER = ("googleapis-common-protos", "markupsafe", "pygments", "markdown-it-py", "mdurl", "typing-extensions")


def build(folder: Path, python: str = PYTHON) -> None:
    """Fill the folder. Raises SystemExit where it comes to more than MOST_BYTES."""
    from tqdm import tqdm  # which a bare host does not have

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    for wheel in folder.glob("*.whl"):
        without_weights(wheel)
    for requirement in tqdm(_requirements(), desc=f"wheels for Python {python}", file=sys.stderr):
        _pip("download", "--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp",
             *(word for platform in _PLATFORMS for word in ("--platform", platform)),
             "-c", str(ROOT / "constraints.txt"), "--dest", str(folder), requirement)  # fmt: skip
    (folder / "python").write_text(python + "\n")
    num_bytes = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels for Python {python}, {num_bytes / (1 << 20):.1f} MiB")
    if num_bytes > MOST_BYTES:
        raise SystemExit(f"more than {MOST_BYTES >> 20} MiB")


def without_weights(wheel: Path) -> None:
    """Write a wheel anew without the weights of a model. No pip is to read it then: its list of files is too long."""
    fresh = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            if not entry.filename.endswith(_LEFT_OUT):
                new.writestr(entry, old.read(entry))
    fresh.replace(wheel)


def install(folder: Path, target: Path) -> None:
    """Unpack all wheels, beside what this Python has. Raises SystemExit where they are for another Python."""
    python, mine = (folder / "python").read_text().strip(), ".".join(platform.python_version_tuple()[:2])
    if python != mine:
        raise SystemExit(
            f"the bundle is for Python {python}, and this is {mine}: name the other one (make PYTHON=python{python} gpu-check),"
            f" or bundle again for this one (make gpu-bundle BUNDLE_PYTHON={mine})"
        )
    target.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(target)


def _requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["engine"], *_FURTHER]
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
        build(Path(sys.argv[1]), *sys.argv[2:3])
