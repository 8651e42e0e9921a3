"""The core under the Hypothesis machine: rules R1 to R8 after every rule (docs/inside/reliability.md, promise 1, 4 to 7, 9)."""

from hypothesis import HealthCheck, settings

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from tests.support.slices import scaled
from tests.support.worlds.drivers import CoreDriver
from tests.support.worlds.machine import CacheMachine


class CoreMachine(CacheMachine):
    def make_driver(self, config: PoolConfig) -> CoreDriver:
        return CoreDriver(config, reclaim_at_once=1 if config.max_sequences % 2 else 10**9)


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=scaled(500),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
