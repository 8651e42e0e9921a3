"""Fixtures of the end-to-end tests."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.processes.service_pair import FRONTS_VARIABLE, Services, services

# Engines have a front by default. In tests they have none, which starts sooner, but for the files of fronts, and for these: the
# calls of gateways, health, and the end.
_WITH_FRONT = ("test_drains", "test_gateway_calls", "test_readiness")


@pytest.fixture(autouse=True, scope="module")
def _fronts(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem in _WITH_FRONT:
            patch.setenv(FRONTS_VARIABLE, os.environ.get(FRONTS_VARIABLE, "1"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_model() -> ServedModel:
    """Loaded once; a test that changes it changes a copy."""
    return load_served_model(EngineConfig(model=str(DEMO_MODEL_DIR), progress=False))


@pytest.fixture
async def world() -> AsyncIterator[Services]:
    async with services() as found:
        yield found
