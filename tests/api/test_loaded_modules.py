"""A running service loads no module of numpy: loading one would hold up every step."""

import subprocess
import sys

_WORK = """
import asyncio, sys
import numpy as np
from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.worlds.cache_api import serving

async def work():
    async with serving(num_blocks=16, eviction_policy=sys.argv[1]) as api:
        session = await api.open()
        loaded = set(sys.modules)
        step_id = 0
        for sequence_id in range(1, 9):
            await session.create(sequence_id, 40, first=40 * sequence_id)
            one = np.array([sequence_id], np.int64).tobytes()
            length = np.array([40], np.int32).tobytes()
            most = np.array([64], np.int32).tobytes()
            for columns in (
                {"start_sequence_ids": one, "start_max_new_tokens": most, "start_max_hit_tokens": most},
                {"commit_sequence_ids": one, "commit_num_tokens": length, "commit_num_new_tokens": bytes(4)},
                {"release_sequence_ids": one},
            ):
                step_id += 1
                await session.step(step_id, **columns)
        stats = (await api.stats()).pools[0]
        assert stats.num_evicted_blocks, "nothing was evicted"
        await session.call("EvictBlocks", num_blocks=1)
        await session.call("ClearPrefixCache")
        await api.audit()
        print(sorted(name for name in set(sys.modules) - loaded if name.startswith("numpy")), file=sys.stderr)

asyncio.run(work())
"""


def test_work_loads_no_module_of_numpy() -> None:
    for policy in ("lru", "adaptive"):
        done = subprocess.run([sys.executable, "-c", _WORK, policy], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[-1] == "[]"


_START = """
import asyncio, sys
from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.server import start_server

async def start():
    server = await start_server(CacheConfig(listen="127.0.0.1:0", num_blocks=16, metrics_listen=sys.argv[1]))
    print("prometheus_client" in sys.modules, file=sys.stderr)
    await server.stop()

asyncio.run(start())
"""


def test_a_service_without_metrics_starts_without_an_http_server() -> None:
    for listen, is_loaded in (("", "False"), ("127.0.0.1:0", "True")):
        done = subprocess.run([sys.executable, "-c", _START, listen], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert is_loaded in done.stderr.splitlines()
