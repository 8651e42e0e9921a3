"""The core is pure: values in, values out, and no locks, because one task owns it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", ["core.manager", "runtime.lease"])
def test_the_core_loads_no_grpc_asyncio_or_torch(module: str) -> None:
    check = (
        f"import kvkeeper.cache_service.{module}, sys\n"
        "print({'grpc', 'asyncio', 'torch', 'google', 'structlog'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=".")
    assert found.stdout == "set()\n"


def test_the_core_takes_no_locks() -> None:
    files = list(Path("cache_service/core").rglob("*.py"))
    locking = [path.name for path in files if re.search(r"\bthreading\b|\bLock\(", path.read_text())]
    assert len(files) > 20
    assert locking == []
