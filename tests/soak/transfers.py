"""Row 9: nothing is reused with a copy in flight, however the copy ends.

Engines on a pool with a host tier report their orders late, twice, as failed or never, and die with orders in flight that run
all the same. The content oracle of both tiers sees a block that was granted before its copy was over.
"""

from tests.soak.row import Counts
from tests.support.tiers.tier_simulation import NUM_EVENTS, TierSimulation


def run(seed: int) -> Counts:
    """Counts blocks moved; faults are late, repeated, failed and missing completions, and deaths."""
    simulation = TierSimulation(seed)
    for _ in range(NUM_EVENTS):
        simulation.tick()
    counts = simulation.finish()
    return Counts(counts.moved, counts.late + counts.repeated + counts.failed + counts.silent + counts.deaths)
