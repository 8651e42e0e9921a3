"""Row 1: block accounting is exact. The machine and the simulator of the core, audited after every step.

A unit of the machine is some Hypothesis examples; a unit of the simulator is one pool with its engines until so many items
have changed a sequence. Both compare with the naive model and with what the blocks hold.
"""

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from tests.sim.simulation import Counts as SimulationCounts
from tests.sim.simulation import Simulation
from tests.soak.row import Counts
from tests.support.worlds.drivers import CoreDriver
from tests.support.worlds.machine import CacheMachine

CHANGES_PER_SEED = 3000
MOST_IDLE_TICKS = 20_000  # about 20 virtual minutes in which no engine gets anything done
_EXAMPLES_PER_SEED = 20


def audited_steps(seed_number: int) -> Counts:
    """Counts audits; the fault is a refusal for want of room, which tiny pools see all the time."""
    num_audits = num_refusals = 0

    class AuditedMachine(CacheMachine):
        def make_driver(self, config: PoolConfig) -> CoreDriver:
            self.core = CoreDriver(config)
            return self.core

        def holds(self) -> None:
            nonlocal num_audits
            super().holds()
            num_audits += 1

        def teardown(self) -> None:
            nonlocal num_refusals
            num_refusals += self.core.stats().num_refusals

    run_state_machine_as_test(
        seed(seed_number)(AuditedMachine),
        settings=settings(
            max_examples=_EXAMPLES_PER_SEED,
            stateful_step_count=60,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Counts(num_audits, num_refusals)


def simulate(seed_number: int, num_changes: int = CHANGES_PER_SEED, audit_every: int = 1) -> SimulationCounts:
    """One simulation until so many items have changed a sequence. A failure names its tick."""
    simulation, tick, done, last_change = Simulation(seed_number, audit_every), 0, 0, 0
    try:
        while done < num_changes:
            simulation.tick()
            tick += 1
            if simulation.world.naive.num_changes > done:
                done, last_change = simulation.world.naive.num_changes, tick
            if tick - last_change > MOST_IDLE_TICKS:
                raise AssertionError("no progress")
        return simulation.finish()
    except Exception as error:
        error.add_note(f"seed {seed_number} fails in tick {tick}")
        raise


def seeded_operations(seed_number: int) -> Counts:
    """Counts items that changed a sequence; faults are losses, repeats, deaths, hangs and hostile steps."""
    counts = simulate(seed_number)
    faults = (counts.requests_lost, counts.replies_lost, counts.repeats, counts.deaths, counts.hangs, counts.refused_steps)
    return Counts(counts.changes, sum(faults))
