"""Units of work for tests of the soak itself, where its worker processes can import them."""

import os
import time

from tests.soak.row import Counts


def unit(folder: str, broken: int, faults: int, seed: int) -> Counts:
    """Notes that it ran; fails for one seed while a file says so, hangs for another, and dies for a third."""
    with open(f"{folder}/ran", "a") as file:
        file.write(f"{seed}\n")
    if seed == broken and not os.path.exists(f"{folder}/repaired"):
        raise AssertionError("the promise is broken")
    if seed == 50:
        time.sleep(3600)
    if seed == 60:
        os._exit(1)
    return Counts(10, faults)
