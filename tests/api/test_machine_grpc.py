"""The machine that drives the core, on a live service (docs/inside/reliability.md, promise 1): both ways to step."""

from hypothesis import HealthCheck, settings

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from tests.support.slices import scaled
from tests.support.worlds.grpc_driver import GrpcDriver, LoopThread
from tests.support.worlds.machine import CacheMachine


class ServiceMachine(CacheMachine):
    thread: LoopThread | None = None
    driver: GrpcDriver | None = None

    def make_driver(self, config: PoolConfig) -> GrpcDriver:
        ServiceMachine.thread = ServiceMachine.thread or LoopThread()
        self.driver = GrpcDriver(config, ServiceMachine.thread)
        return self.driver

    def teardown(self) -> None:
        if self.driver is not None:
            self.driver.close()


TestServiceMachine = ServiceMachine.TestCase
TestServiceMachine.settings = settings(
    max_examples=scaled(100),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
