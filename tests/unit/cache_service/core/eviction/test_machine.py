"""Every eviction policy under the Hypothesis machine: the pool's audits after every rule, and leaves before parents."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from tests.support.slices import scaled
from tests.support.worlds.drivers import CoreDriver
from tests.support.worlds.machine import CacheMachine

# The model knows the order of LRU exactly: that policy is in test_machine.py.
OTHERS = [name for name in POLICY_NAMES if name != "lru"]


class PolicyMachine(CacheMachine):
    def __init__(self, policy: str) -> None:
        super().__init__()
        self._policy = policy

    def make_driver(self, config: PoolConfig) -> CoreDriver:
        return CoreDriver(replace(config, eviction_policy=self._policy))


@pytest.mark.parametrize("policy", OTHERS)
def test_pool_stays_whole_and_victims_are_leaves(policy: str) -> None:
    limits = settings(
        max_examples=scaled(60, 3), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(lambda: PolicyMachine(policy), settings=limits)
