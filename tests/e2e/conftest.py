"""Fixtures of the end-to-end tests."""

import gc
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from tests.support.processes.service_pair import Services, services


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """Few objects hold the memory of the services of a module, so Python would look for them late, gigabytes later."""
    yield
    gc.collect()


@pytest.fixture
async def world() -> AsyncIterator[Services]:
    async with services() as found:
        yield found
