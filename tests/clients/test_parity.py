"""The synchronous client can do all that the asyncio one can, with the same arguments."""

import inspect
import subprocess
import sys
from typing import Any

import pytest

from kvkeeper import client

PAIRS = [
    (client.AsyncCacheClient, client.CacheClient),
    (client.AsyncCacheSession, client.CacheSession),
    (client.AsyncEngineClient, client.EngineClient),
    (client.AsyncGeneration, client.Generation),
]


def public_methods(owner: type) -> dict[str, Any]:
    return {name: method for name, method in inspect.getmembers(owner, inspect.isfunction) if name[0] != "_"}


@pytest.mark.parametrize(("asynchronous", "synchronous"), PAIRS, ids=lambda owner: owner.__name__)
def test_every_method_has_a_twin_with_the_same_arguments(asynchronous: type, synchronous: type) -> None:
    ours, theirs = public_methods(asynchronous), public_methods(synchronous)
    assert ours.keys() == theirs.keys()
    for name, method in ours.items():
        assert inspect.signature(method).parameters == inspect.signature(theirs[name]).parameters, name
        assert method.__doc__ is None or name in ("step",) or method.__doc__ == theirs[name].__doc__, name


def test_the_client_pulls_in_no_service_and_no_torch() -> None:
    code = (
        "import sys, kvkeeper.client, kvkeeper.cli\n"
        "services = ['kvkeeper.' + name for name in ('cache_service', 'engine_service', 'kernels')]\n"
        "print([name for name in ('torch', *services) if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
