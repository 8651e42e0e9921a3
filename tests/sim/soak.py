"""Seeded soak of the core: `python -m tests.sim.soak --ops N --seed S`.

Runs simulations of consecutive seeds until N items have changed a sequence, with a progress bar, and prints one JSON line.
A failure names the seed and the tick that replay it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from tqdm import tqdm

from tests.sim.simulation import Counts, Simulation

CHANGES_PER_SEED = 3000
MOST_IDLE_TICKS = 20_000  # about 20 virtual minutes in which nobody gets anything done


def soak(num_changes: int, seed: int, progress: Callable[[int], object] = lambda done: None) -> Counts:
    """Simulations of seed, seed + 1, ... until at least num_changes items changed a sequence."""
    total = Counts()
    while total.changes < num_changes:
        simulation, tick, done, last_change = Simulation(seed), 0, 0, 0
        wanted = min(CHANGES_PER_SEED, num_changes - total.changes)
        try:
            while done < wanted:
                simulation.tick()
                tick += 1
                changed = simulation.world.naive.num_changes - done
                done += changed
                progress(changed)
                last_change = tick if changed else last_change
                if tick - last_change > MOST_IDLE_TICKS:
                    raise AssertionError("no progress")
            total.add(simulation.finish())
        except Exception as error:
            error.add_note(f"replay with seed {seed}: fails in tick {tick}")
            raise
        seed += 1
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=100_000, help="items that change a sequence (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default: %(default)s)")
    args = parser.parse_args(argv)
    started = time.perf_counter()
    with tqdm(total=args.ops, unit="op", unit_scale=True) as bar:
        counts = soak(args.ops, args.seed, bar.update)
    seconds = time.perf_counter() - started
    print(json.dumps({"soak": "core", "seed": args.seed, "seconds": round(seconds, 1), **asdict(counts)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
