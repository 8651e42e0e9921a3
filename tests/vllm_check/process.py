"""One vLLM process: `python process.py MODEL ADDRESS BLOCKS`, in vLLM's environment; an empty address is no connector.

Each line on the standard input is a job, {"prompts": [[ids]], "num_tokens": n}, and each on the standard output its result: the
tokens of each prompt, and their log probabilities. With "one_by_one" each prompt comes alone first: the seconds to its first
token, and how many of its tokens vLLM did not compute. BLOCKS of vLLM's own, empty for many.
"""

import json
import os
import sys
import time
from typing import Any

BLOCK_SIZE = 32


def main(model: str, address: str, num_blocks: str) -> None:
    # Results have a standard output of their own; what vLLM and its children write goes beside it.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    transfer = {
        "kv_connector": "KvkeeperConnector",
        "kv_connector_module_path": "kvkeeper.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, "call_timeout_s": 30.0, "lookup_timeout_s": 5.0},
    }
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        enforce_eager=True,
        seed=0,
        disable_log_stats=False,
        num_gpu_blocks_override=int(num_blocks) if num_blocks else None,
        **({"kv_transfer_config": transfer} if address else {}),
    )
    generate(llm, [[5, 6, 7]], 2)  # what is made at the first call
    print(json.dumps({"ready": True}), file=results, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        first_s, num_cached = [], []
        for prompt in job["prompts"] if job.get("one_by_one") else ():
            begun = time.perf_counter()
            num_cached += generate(llm, [prompt], 1)["num_cached"]
            first_s.append(time.perf_counter() - begun)
        result = generate(llm, job["prompts"], job["num_tokens"]) | {"first_s": first_s, "num_cached": num_cached}
        result["num_preemptions"] = sum(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions")
        print(json.dumps(result), file=results, flush=True)


def generate(llm: Any, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=num_tokens, min_tokens=num_tokens, logprobs=1, detokenize=False, ignore_eos=True
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(answer.token_ids) for answer in answers],
        "logprobs": [
            [position[token].logprob for token, position in zip(answer.token_ids, answer.logprobs, strict=True)]
            for answer in answers
        ],
        "num_cached": [output.num_cached_tokens or 0 for output in outputs],
        "finish": [answer.finish_reason for answer in answers],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
