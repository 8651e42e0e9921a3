"""kvkeeper for the side-by-side figures: `python -P kvkeeper_process.py MODEL DTYPE`, by a checkout's interpreter and path.

Starts both services as processes, and is their client. Lines on the standard streams are those of systems.py. Imports of the
checkout what each checkout has, so that another one can be measured beside this one.
"""

import asyncio
import json
import sys
import time

import numpy as np

from kvkeeper.client import AsyncEngineClient
from tests.benchmarks.both_services import ask, both_services

_POOL_MEMORY = "2GiB"  # no workload is to run out of it


async def main(model: str, dtype: str) -> None:
    begin = time.perf_counter()
    async with both_services("--model", model, "--dtype", dtype, cache_flags=("--pool-memory", _POOL_MEMORY)) as (client, _):
        print(json.dumps({"ready_s": time.perf_counter() - begin}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await _run(client, json.loads(line))), flush=True)


async def _run(client: AsyncEngineClient, job: dict) -> dict[str, object]:
    prompts = [np.array(prompt, np.int32) for prompt in job["prompts"]]
    replies = await asyncio.gather(*(ask(client, prompt, job["num_new"]) for prompt in prompts))
    return {"times": [reply.times for reply in replies], "tokens": [reply.token_ids for reply in replies]}


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
