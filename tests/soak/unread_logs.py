"""Row 38: a log that cannot be written, or is not read, costs log lines only.

Real processes. Their outputs, both, are on a full disk, have lost their reader, or go into a pipe whose reader is at rest, from
the start on. Sessions are opened and requests asked for until more lines were dropped than may wait; every call has its result.
Then the pipe is read: the log says how many lines are missing in each place, and both counters are what the log says.
"""

import asyncio
import json
import os
import threading
from collections import Counter

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.soak.row import Counts
from tests.support.processes.broken_outputs import BROKEN, unread
from tests.support.processes.fleet import DEADLINE_S
from tests.support.processes.service_pair import generate, toy_output
from tests.support.processes.unread_services import UnreadServices, unread_services
from tests.support.worlds.cache_api import SPEC

_ENGINE_FLAGS = ("--model", "hash-toy", "--block-size", "4", "--fronts", "1", "--threads", "1")
_KINDS = ("unread", *BROKEN)
_NUM_AT_ONCE = 16
_NUM_EACH = 8  # calls in a round, of each of those at once
_MAX_ROUNDS = 1000
_NAME = "n" * 200  # of a client: with long lines a queue is full sooner
_PROMPT, _NUM_NEW = [3, 4, 5, 6, 7], 2


async def run(seed: int) -> Counts:
    """Counts calls that had their results; faults are lines that were dropped. The seed says what is wrong with the log."""
    kind = _KINDS[seed % len(_KINDS)]
    reading, writing = unread() if kind == "unread" else (None, BROKEN[kind]())
    num_rounds, dropped = 0, Counter[str]()
    async with unread_services(writing, _ENGINE_FLAGS) as services:
        while min(dropped["cache"], dropped["engine"]) == 0:
            assert num_rounds < _MAX_ROUNDS, "nothing was ever dropped"
            num_rounds += 1
            await asyncio.gather(*(_call(services) for _ in range(_NUM_AT_ONCE)))
            dropped = await _dropped(services)
        if reading is not None:
            both_told = threading.Event()
            told = asyncio.create_task(asyncio.to_thread(_told, reading, both_told))
            # Until then the queues may still be full, and what a service writes at its end may be dropped, too.
            assert await asyncio.to_thread(both_told.wait, DEADLINE_S), "both logs say that lines are missing"
            dropped = await _dropped(services)
        assert await services.end() == [0, 0]
    os.close(writing)
    if reading is not None:
        assert await told == dropped, "the log and the counters tell the same"
    return Counts(2 * _NUM_AT_ONCE * _NUM_EACH * num_rounds, dropped.total())


async def _call(services: UnreadServices) -> None:
    for _ in range(_NUM_EACH):
        session = await services.cache_client.open_session(SPEC, pb.EXECUTOR_CACHE, client_name=_NAME)
        await session.close()
        output = await generate(services.engine_client, _PROMPT, _NUM_NEW)
        assert output.token_ids == [toy_output(_PROMPT, _NUM_NEW)]


async def _dropped(services: UnreadServices) -> Counter[str]:
    """Lines that each service has counted."""
    cache, engine = await services.cache_client.stats(), await services.engine_client.stats()
    assert len(cache.sessions) == 1, "the engine's own"
    return Counter(cache=cache.num_dropped_log_lines, engine=engine.num_dropped_log_lines)


def _told(reading: int, both_told: threading.Event) -> Counter[str]:
    """Lines that each log says are missing, once all writers have ended. Every line is whole. Sets the event once both have."""
    missing = Counter[str]()
    with os.fdopen(reading, "rb") as lines:
        next(lines)  # that filled the pipe
        for line in map(json.loads, lines):
            if line["event"] == "log_lines_dropped":
                missing[line["service"]] += line["num_lines"]
                if len(missing) == 2:
                    both_told.set()
    return missing
