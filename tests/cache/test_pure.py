"""The core is pure: values in, values out."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["manager", "session"])
def test_the_core_loads_no_grpc_asyncio_or_torch(module: str) -> None:
    check = (
        f"import cache_service.{module}, sys; print({{'grpc', 'asyncio', 'torch', 'google', 'structlog'}} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=".")
    assert found.stdout == "set()\n"
