"""vLLM for the side-by-side figures: `python vllm_process.py MODEL DTYPE`, in vLLM's environment, which has nothing of ours.

Its asynchronous engine with its own defaults, in this process and the engine's: no server is in between, which flatters it.
Lines on the standard streams are those of systems.py.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any


async def main(model: str, dtype: str) -> None:
    # Results have a standard output of their own; what vLLM and its children write goes beside it.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, dtype=dtype, skip_tokenizer_init=True))
    print(json.dumps({}), file=results, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = json.loads(line)
        streams = (stream(engine, prompt, job["num_new"]) for prompt in job["prompts"])
        times, tokens = zip(*await asyncio.gather(*streams), strict=True)
        print(json.dumps({"times": times, "tokens": tokens}), file=results, flush=True)
    engine.shutdown()


_num_requests = 0


async def stream(engine: Any, prompt: list[int], num_new: int) -> tuple[list[float], list[int]]:
    """When each chunk came, in seconds from the request, and the tokens of all."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    global _num_requests
    _num_requests += 1
    sampling = SamplingParams(
        temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    begin, times, tokens = time.perf_counter(), list[float](), list[int]()
    async for output in engine.generate({"prompt_token_ids": prompt}, sampling, str(_num_requests)):
        times.append(time.perf_counter() - begin)
        tokens += output.outputs[0].token_ids
    assert len(tokens) == num_new, "every token was asked for"
    return times, tokens


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
