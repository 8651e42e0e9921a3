"""Engines over several ranks, each a process with an arena of its own: tokens, tiers, and the loss of any process.

The model is the hash toy mostly, which finds a wrong slot in the arena of any rank.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.processes.service_pair import Services, generate, toy_output, until

PROMPT = list(range(40, 61))


async def start(world: Services, num_ranks: int = 2, **options: object):  # type: ignore[no-untyped-def]
    engine = await world.start_engine(tensor_parallel=num_ranks, **options)
    return engine, await world.client(engine)


async def test_tokens(world: Services) -> None:
    await world.start_cache()
    engine, client = await start(world)
    output = await generate(client, PROMPT)
    assert output.token_ids == [toy_output(PROMPT, 8)]
