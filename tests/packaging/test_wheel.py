"""The wheel, as a user gets it: built in isolation and installed into a fresh environment with its declared dependencies only.

First without an extra: all but the engine is imported, and the cache service steps. Then with the extra `engine`: every module
is imported but the one that compiles kernels, and that one with the extra `cpu`. Catches a dependency that is used and not
declared, and a folder that the build leaves out. What an extra declares is linked from the environment of the tests, where
`make install` has installed it: torch alone would take longer than all else here.
"""

import contextlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.processes.services import short_folder, sockets_in

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_ROOTS = ("cache_service", "engine_service", "kernels", "common", "clients/python/kvkeeper", "protos/kvkeeper")


OF_THE_ENGINE = ("kvkeeper.engine_service", "kvkeeper.kernels")  # modules that need the extra
OF_OTHER_EXTRAS = (  # `cpu`, `http`, `gateway`, `remote`, `events`, `gguf`
    *(
        f"kvkeeper.kernels.cpu.{name}"
        for name in (
            *(
                f"{of}_kernels"
                for of in (
                    "attention",
                    "conv",
                    "delta",
                    "expert",
                    "integer",
                    "penalty",
                    "product",
                    "program",
                    "quantised",
                    "row",
                )
            ),
            *("attention_tiles", "delta_tiles", "integer_tiles", "kernel_parts", "key_tiles", "number_formats", "tiles"),
        )
    ),
    "kvkeeper.http",
    "kvkeeper.engine_service.rpc.gateway",
    "kvkeeper.cache_service.memory.remote.redis_link",
    "kvkeeper.cache_service.memory.remote.cluster_link",
    "kvkeeper.cli.publishing.kv_events",
    "kvkeeper.cli.publishing.publication",
    "kvkeeper.cli.models.gguf_tokenizer",
)
QUICK = ("-q", "--no-compile")  # only what is imported here is compiled
OF_MOONCAKE = "kvkeeper.cache_service.memory.remote.mooncake_process"  # its package needs libraries of the system
OF_VLLM = "kvkeeper.vllm.connector"  # needs vLLM, which no extra brings; `make vllm-check` imports it
IMPORT_ALL = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
UNTIL_SERVING = """
import asyncio, sys
from kvkeeper.cli.show.readiness import until_serving
asyncio.run(asyncio.wait_for(until_serving(sys.argv[1]), 60))
"""


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
    done = subprocess.run(command, cwd=cwd, env=bare(cwd), text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def bare(folder: Path) -> dict[str, str]:
    keep = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP", "http"))}
    return {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8", **keep}


@contextlib.contextmanager
def cache_service(program: Path, folder: Path) -> Iterator[str]:
    """The address of an installed cache service, which may not serve yet."""
    address, _ = sockets_in(folder)
    command = (str(program), "cache", "--listen", address, "--runtime-dir", str(folder), "--pool-memory", "1MiB")
    with subprocess.Popen(command, cwd=folder, env=bare(folder), stderr=subprocess.DEVNULL) as service:
        try:
            yield address
        finally:
            service.terminate()


def required(declared: str, extra: str | None) -> set[str]:
    """Names of the packages that the metadata asks for with the extra, or without any."""
    lines = [line.removeprefix("Requires-Dist: ") for line in declared.splitlines() if line.startswith("Requires-Dist: ")]
    wanted = [line for line in lines if (f'extra == "{extra}"' in line if extra else "extra ==" not in line)]
    return {name_of(line) for line in wanted}


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~;]", requirement)[0].strip()


def link(requirements: list[str], site: Path) -> None:
    """Packages that are installed here, with all that they require, as links in another environment's folder of packages."""
    linked, waiting = set(), [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in linked:
            continue
        linked.add(str(requirement))
        found = metadata.distribution(requirement.name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
        for inner in map(Requirement, found.requires or ()):
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in requirement.extras or {""}):
                waiting.append(inner)


def test_wheel_holds_and_imports_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"
    run("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(source), cwd=tmp_path)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source), cwd=tmp_path)
    (wheel,) = tmp_path.glob("kvkeeper-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("demo_model/model.safetensors") for name in names)
    assert {"kvkeeper/client/py.typed", "kvkeeper/engine/v1/py.typed"} <= set(names)
    assert not any(name.startswith("tests/") or "examples/" in name for name in names)
    (metadata_path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    declared = zipfile.ZipFile(wheel).read(metadata_path).decode()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert required(declared, None) == {name_of(text) for text in project["dependencies"]}
    assert required(declared, "engine") == {name_of(text) for text in project["optional-dependencies"]["engine"]}
    assert "torch" in required(declared, "engine")

    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", str(venv), cwd=tmp_path)
    python = str(venv / "bin" / "python")
    constraints = str(source / "constraints.txt")
    modules = sorted(modules_in_tree() - {OF_VLLM, OF_MOONCAKE})
    assert {f"{name.replace('.', '/')}.py" for name in (OF_VLLM, OF_MOONCAKE)} <= set(names)
    assert {"kvkeeper.cache_service.core.manager", "kvkeeper.client", "kvkeeper.cache.v1.cache_service_pb2"} <= set(modules)
    others = [name for name in modules if not name.startswith((*OF_THE_ENGINE, *OF_OTHER_EXTRAS))]

    run(python, "-m", "pip", "install", *QUICK, "-c", constraints, str(wheel), cwd=tmp_path)
    installed = {name_of(line).lower() for line in run(python, "-m", "pip", "freeze", cwd=tmp_path).splitlines()}
    assert not installed & required(declared, "engine")
    run(python, "-W", "error", "-c", IMPORT_ALL, *others, cwd=tmp_path)
    assert "usage: kvkeeper" in run(str(venv / "bin" / "kvkeeper"), "--help", cwd=tmp_path)
    with short_folder() as folder, cache_service(venv / "bin" / "kvkeeper", folder) as address:
        run(python, "-c", UNTIL_SERVING, address, cwd=tmp_path)
        example = source / "clients" / "python" / "examples" / "cache_session.py"
        assert "4 of 6 tokens are cached" in run(python, str(example), address, cwd=tmp_path)

    (site,) = (venv / "lib").glob("python3*/site-packages")
    extras = project["optional-dependencies"]
    link(extras["engine"], site)
    engine = [name for name in modules if not name.startswith(OF_OTHER_EXTRAS)]
    run(python, "-W", "error", "-c", IMPORT_ALL, *engine, cwd=tmp_path)
    link(extras["cpu"] + extras["http"] + extras["gateway"] + extras["remote"] + extras["events"] + extras["gguf"], site)
    run(python, "-W", "error", "-c", IMPORT_ALL, *(name for name in modules if name.startswith(OF_OTHER_EXTRAS)), cwd=tmp_path)
