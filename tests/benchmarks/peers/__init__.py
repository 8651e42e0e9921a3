"""kvkeeper beside vLLM on a CPU and llama.cpp: the same weights, prompts and numbers of greedy tokens, in turns on one machine.

`python -m tests.benchmarks peers` measures all; `python -m tests.benchmarks.peers` has flags that choose. The folder owns the
peers' environments, one process a system that takes jobs, the workloads, and the table. A peer that does not install is left
out with a sentence. vllm_process.py, llama_process.mjs and write_gguf.py run in the peers' environments and import nothing of
ours.
"""

from collections.abc import Iterator


def figures() -> Iterator[dict[str, object]]:
    """All systems, kinds of numbers and workloads. The table is written to the standard error at the end."""
    from tests.benchmarks.peers.__main__ import choose, measure

    return measure(choose([]))
