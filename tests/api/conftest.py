"""What the tests of the API share: a service in this process, with time that the test moves or with the loop's."""

from collections.abc import AsyncIterator

import pytest

from tests.support.worlds.cache_api import Api, ManualClock, serving


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def api(clock: ManualClock) -> AsyncIterator[Api]:
    """Ends with an audit: the state is sound after every test."""
    async with serving(clock=clock) as served:
        yield served
        await served.audit()
