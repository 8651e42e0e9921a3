"""What the tests of the API share: a service in this process, with time that the test moves or with the loop's."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.processes.child_processes import Processes
from tests.support.worlds.cache_api import Api, ManualClock, serving
from tests.support.worlds.step_carriers import StepCarriers


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def api(clock: ManualClock) -> AsyncIterator[Api]:
    """Ends with an audit: the state is sound after every test."""
    async with serving(clock=clock) as served:
        yield served
        await served.audit()


@pytest.fixture(params=["grpc", "lane"])
def carriers(api: Api, request: pytest.FixtureRequest) -> Iterator[StepCarriers]:
    """What carries steps: StreamSteps, then a step lane."""
    made = StepCarriers(api, request.param)
    yield made
    made.close()


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    started = Processes()
    yield started
    await started.end()
