"""Row 39: control frames cost what they carry. A client without credentials sends them without a pause, and others are served.

Real processes. Each kind of frame, on each of the four servers of both services, for fifteen seconds. One connection leaves the
services' memory within 64 MB of what it was; eight leave the requests of others their turn.
"""

import asyncio

from tests.soak.row import Counts
from tests.support.processes.flood import KINDS
from tests.support.processes.flooded import SERVERS, Flooded, flooded

_SECONDS = 15.0
_MOST_MB = 64.0
_MANY = 8


async def run(seed: int) -> Counts:
    """Counts floods, all kinds on one server; the fault is a request that was answered beside one. Worst: MB of memory more."""
    server = [*SERVERS][seed % len(SERVERS)]
    num_answered, worst = 0, 0.0
    async with flooded() as world:
        for kind in KINDS:
            for num_connections in (1, _MANY):
                grown, answered = await _flood(world, server, kind, num_connections)
                num_answered += answered
                if num_connections == 1:
                    worst = max(worst, grown)
                    assert grown <= _MOST_MB, f"{kind} at the {server} server: {grown:.0f} MB more"
    return Counts(2 * len(KINDS), num_answered, worst)


async def _flood(world: Flooded, server: str, kind: str, num_connections: int) -> tuple[float, int]:
    """MB more than before, and how many requests were answered meanwhile."""
    before, answered = world.memory_mb(), 0
    async with world.flood(server, kind, num_connections, seconds=_SECONDS) as flooding:
        watching = asyncio.create_task(world.most_memory_mb(flooding))
        while not flooding.done():
            await world.ask()
            answered += not flooding.done()
        grown = await watching - before
        sent = sum(count for count, _ in flooding.result())
    assert sent, f"{kind}: nothing was sent"
    assert answered, f"{kind} at the {server} server: no request was answered before the flood was over"
    return grown, answered
