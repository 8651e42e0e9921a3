"""Fixtures of the end-to-end tests."""

from collections.abc import AsyncIterator

import pytest
import torch

from tests.support.processes.service_pair import Services, services


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
async def world() -> AsyncIterator[Services]:
    async with services() as found:
        yield found
