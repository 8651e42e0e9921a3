"""What a sequence takes while it waits: its prompt and a row of each column, not a row of as many tokens as it may get."""

from pathlib import Path

import numpy as np
import pytest

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import Executor, SequenceId
from tests.support.worlds.core_pool import A, CorePool, step_batch

MOST_BYTES = 1536  # of a waiting sequence of 19 tokens
NUM_WAITING = 8192


def resident_bytes() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) << 10


@pytest.mark.parametrize(("max_sequences", "max_tokens"), [(1 << 16, 4096), (1 << 13, 1 << 15)])  # rows of 16 and of 128 KiB
def test_a_waiting_sequence_takes_what_its_prompt_takes(max_sequences: int, max_tokens: int) -> None:
    manager = PoolManager(PoolConfig(4096, 16, max_sequences=max_sequences, max_tokens_per_sequence=max_tokens))
    manager.sessions.open(A, Executor.ENGINE)
    prompts = np.random.default_rng(0).integers(0, 1000, (NUM_WAITING, 19)).astype(np.int32)
    manager.creation.create(A, SequenceArgs(SequenceId(1 << 20), prompts[0]))  # loads what is needed
    before = resident_bytes()
    for number, prompt in enumerate(prompts[: NUM_WAITING - 1], 1):
        manager.creation.create(A, SequenceArgs(SequenceId(number), prompt))
    assert resident_bytes() - before < NUM_WAITING * MOST_BYTES
    assert manager.queries.tokens(A, 7).tolist() == prompts[6].tolist()


def test_the_tokens_of_a_sequence_are_told_in_each_of_its_states() -> None:
    pool = CorePool(num_blocks=9, block_size=2)
    tokens = np.array([1, 2, 3], np.int32)
    pool.create(1, tokens)
    tokens[:] = 0  # the caller's
    assert pool.manager.queries.tokens(A, 1).tolist() == [1, 2, 3]
    assert pool.create(1, [1, 2, 3]) == 0, "the same arguments again"
    pool.step(starts=[(1, 3, 0)])
    assert pool.manager.queries.tokens(A, 1).tolist() == [1, 2, 3]
    pool.step(commits=[(1, 3, [4])])
    assert pool.manager.queries.tokens(A, 1).tolist() == [1, 2, 3, 4]
    pool.step(releases=[1])
    pool.create(1, [5])  # in the slot of the one that has gone
    assert pool.manager.queries.tokens(A, 1).tolist() == [5]
    pool.step(releases=[1])
    assert not pool.manager.state.sequences.tokens.waiting_slots, "one that never started leaves nothing"


def test_one_that_waits_cannot_be_committed_whatever_its_row_holds() -> None:
    pool = CorePool(num_blocks=9, block_size=2)
    pool.create(1, [7, 8])
    pool.manager.one_item.commit(A, 1, 0, 0, np.array([7, 8], np.int32))  # tokens that are stored already, and none to commit
    batch = step_batch(1, 0, starts=[(1, 2, 0)])
    assert pool.manager.steps.step(A, batch).start_results.tolist() == [1]
