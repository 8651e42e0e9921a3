"""Drive the cache service alone, as an engine would: one session in which a sequence lives, is forked and released.

    python cache_session.py [ADDRESS]

The address is that of a cache service, which `kvkeeper cache` starts; the default is 127.0.0.1:7410. Nothing is computed here:
an engine would write the K and V of each reserved slot to the pool's memory before it commits the slot.
"""

import sys

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import CacheClient, CacheSession, KvkeeperError, StepItems, targets

SPEC = pb.KvSpec(  # sessions with equal specs share one pool
    model_id="example",
    num_layers=2,
    num_kv_heads=2,
    head_dim=4,
    kv_dtype=pb.KV_DTYPE_FLOAT32,
    block_size=4,
    layout=pb.KV_LAYOUT_BLOCK_MAJOR,
)
PROMPT = [11, 12, 13, 14, 15, 16]
EXECUTOR = pb.EXECUTOR_ENGINE  # this program would copy the blocks itself
PARENT, CHILD, LATER = 1, 2, 3  # sequence ids, which the client chooses


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def main(address: str) -> None:
    with CacheClient(address) as client, client.open_session(SPEC, executor=EXECUTOR) as session:
        drive(session)


def drive(session: CacheSession) -> None:
    print(f"a pool of {session.pool.num_blocks} blocks, {session.pool.block_size} tokens each")

    # Step 1: start the prompt. The answer has its block table, with slots for all six tokens.
    session.create_sequence(PARENT, PROMPT)
    started = session.step(StepItems(start_ids=ids(PARENT), start_max_new=numbers(len(PROMPT)), start_max_hit=numbers(5)))
    print(f"started with {started.start_hits[0]} cached tokens and the blocks {started.start_block_ids.tolist()}")

    # Step 2: the prompt is computed and token 17 generated: commit six tokens, fork, and reserve a slot for the seventh.
    forked = session.step(
        StepItems(
            commit_ids=ids(PARENT),
            commit_lens=numbers(6),
            commit_num_new=numbers(1),
            commit_tokens=numbers(17),
            fork_parents=ids(PARENT),
            fork_children=ids(CHILD),
            fork_lens=numbers(6),
            reserve_ids=ids(PARENT),
            reserve_min=numbers(7),
            reserve_max=numbers(7),
        )
    )
    copies = list(zip(forked.copy_sources.tolist(), forked.copy_destinations.tolist(), strict=True))
    print(f"forked; blocks to copy before they are written, source and destination: {copies}")

    # Step 3: both are done.
    session.step(StepItems(release_ids=ids(PARENT, CHILD)))

    # What was committed stays cached: the same prompt finds its whole blocks.
    answer = session.create_sequence(LATER, PROMPT)
    print(f"the same prompt again: {answer.num_matched_tokens} of {len(PROMPT)} tokens are cached")
    session.step(StepItems(release_ids=ids(LATER)))


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else targets.CACHE)
    except KvkeeperError as error:
        sys.exit(str(error))
