"""A process on stand-ins of CUDA: `cuda_process FOLDER cache FLAG...` or `cuda_process FOLDER map ADDRESS`.

`cache` is a cache service whose device is made of memfds. `map` is a client that maps its pool, as an engine does: it prints
"attached", then obeys lines on stdin, "write OFFSET VALUE", "read OFFSET" and "unmap", with a line for each. FOLDER is of the
stand-in of the runtime; the process's own environment tells what its device is like (KVKEEPER_TEST_DEVICE: its uuid).
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import AsyncCacheClient
from kvkeeper.common.cuda import runtime, vmm
from tests.support.stand_ins.fake_cuda import DEVICE, FakeCuda, bytes_at
from tests.support.stand_ins.fake_libcuda import FakeLibcuda
from tests.support.worlds.cache_api import SPEC


def main(argv: Sequence[str]) -> int:
    folder, what, *rest = argv
    uuid = os.environ.get("KVKEEPER_TEST_DEVICE", DEVICE)
    library = FakeLibcuda()
    runtime.use_runtime(FakeCuda(Path(folder), f"{what}-{os.getpid()}", uuids=(uuid,)))
    vmm.use_driver(vmm.VmmDriver(lambda: library))
    if what == "cache":
        from kvkeeper.cache_service import __main__ as cache

        return cache.main(rest)
    asyncio.run(_map(rest[0]))
    return 0


async def _map(address: str) -> None:
    async with AsyncCacheClient(address) as client:
        session = await client.open_session(SPEC, executor=pb.EXECUTOR_ENGINE, ttl_ms=60_000)
        arena = await session.attach()
        lent = arena.device_bytes()
        print("attached", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            words = line.split()
            if words[0] == "unmap":
                del lent
                arena.close()
                print("unmapped", flush=True)
                continue
            place = bytes_at(lent.pointer + int(words[1]), 1)
            if words[0] == "write":
                place[0] = int(words[2])
            print(int(place[0]), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
