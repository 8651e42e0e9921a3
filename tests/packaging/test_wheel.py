"""The wheel, as a user gets it: built in isolation, installed into a fresh environment with its declared dependencies only,
every module of it imported. Catches a dependency that is used and not declared, and a folder that the build leaves out.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_ROOTS = (
    "cache_service", "engine_service", "kernels", "clients/python/kvkeeper", "protos/kvkeeper",
    "deploy/cuda", "deploy/service", "deploy/tracing",
)  # fmt: skip


def modules_in_tree() -> set[str]:
    found = set()
    for root in PACKAGE_ROOTS:
        base = ROOT / root
        prefix = () if base.name == "kvkeeper" else ("kvkeeper",)
        for path in base.rglob("*.py"):
            parts = (*prefix, base.name, *path.relative_to(base).with_suffix("").parts)
            found.add(".".join(part for part in parts if part != "__init__"))
    return found - {"kvkeeper"}


def run(*command: str, cwd: Path) -> str:
    """Runs with next to no environment, so that nothing of the development checkout leaks in."""
    keep = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP", "http"))}
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "LANG": "C.UTF-8", **keep}
    done = subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_wheel_holds_and_imports_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"
    run("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(source), cwd=tmp_path)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source), cwd=tmp_path)
    (wheel,) = tmp_path.glob("kvkeeper-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("demo_model/model.safetensors") for name in names)
    assert {"kvkeeper/client/py.typed", "kvkeeper/engine/v1/py.typed"} <= set(names)
    assert not any(name.startswith("tests/") for name in names)

    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", str(venv), cwd=tmp_path)
    python = str(venv / "bin" / "python")
    constraints = str(source / "constraints.txt")
    run(python, "-m", "pip", "install", "-q", "-c", constraints, "torch==2.13.0", cwd=tmp_path)
    run(python, "-m", "pip", "install", "-q", "-c", constraints, str(wheel), cwd=tmp_path)
    modules = sorted(modules_in_tree())
    assert {"kvkeeper.cache_service.core.manager", "kvkeeper.client", "kvkeeper.cache.v1.cache_service_pb2"} <= set(modules)
    script = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    run(python, "-W", "error", "-c", script, *modules, cwd=tmp_path)
    assert "usage: kvkeeper" in run(str(venv / "bin" / "kvkeeper"), "--help", cwd=tmp_path)
