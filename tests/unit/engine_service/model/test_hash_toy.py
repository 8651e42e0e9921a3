"""The hash toy: right through any paging, wrong as soon as any slot of its cache is."""

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.model.hash_toy import HashToyConfig, HashToyRunner, expected_next_token
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.layout import KvLayout
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch

CONFIG = HashToyConfig()
BLOCK_SIZE = 2
TOKENS = [5, 9, 9, 2, 77, 500, 0]
TABLE = np.array([6, 2, 7, 1], dtype=np.int32)


def make_runner():
    layout = CONFIG.kv_layout(BLOCK_SIZE)
    arena = torch.randint(0, 256, (9 * layout.block_bytes,), dtype=torch.uint8)
    return HashToyRunner(CONFIG, layout.view(arena), layout), layout.view(arena)


def prefill(runner, tokens, table=TABLE, chunk_size=100):
    for at in range(0, len(tokens), chunk_size):
        row = ScheduledRow(tokens[at : at + chunk_size], at, table, WantLogits.ALL)
        logits = runner.forward(build_batch([row], BLOCK_SIZE))
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 100])
def test_it_answers_what_the_tokens_say(chunk_size):
    runner, _ = make_runner()
    assert prefill(runner, TOKENS, chunk_size=chunk_size)[-1] == expected_next_token(TOKENS)


def test_all_logits_and_a_mixed_batch():
    runner, _ = make_runner()
    assert prefill(runner, TOKENS) == [expected_next_token(TOKENS[: n + 1]) for n in range(len(TOKENS))]
    rows = [ScheduledRow([3], 7, TABLE), ScheduledRow([4, 4], 0, np.array([3]), WantLogits.LAST)]
    found = runner.forward(build_batch(rows, BLOCK_SIZE)).argmax(-1).tolist()
    assert found == [expected_next_token([*TOKENS, 3]), expected_next_token([4, 4])]


def test_a_forked_block_answers_like_its_source():
    runner, _ = make_runner()
    prefill(runner, TOKENS)
    runner.copy_blocks([(1, 8)])
    row = ScheduledRow([3], 7, np.array([6, 2, 7, 8], dtype=np.int32))
    assert runner.forward(build_batch([row], BLOCK_SIZE)).argmax().item() == expected_next_token([*TOKENS, 3])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("position", range(7))
def test_any_changed_element_changes_the_answer(layer, kind, position):
    runner, view = make_runner()
    prefill(runner, TOKENS)
    bits = view.view(torch.int16)[TABLE[position // BLOCK_SIZE], layer, kind, position % BLOCK_SIZE, 0]
    bits[position % 4] ^= 1
    row = ScheduledRow([3], 7, TABLE)
    assert runner.forward(build_batch([row], BLOCK_SIZE)).argmax().item() != expected_next_token([*TOKENS, 3])


def test_swapped_blocks_change_the_answer():
    runner, _ = make_runner()
    prefill(runner, TOKENS)
    row = ScheduledRow([3], 7, TABLE[[1, 0, 2, 3]])
    assert runner.forward(build_batch([row], BLOCK_SIZE)).argmax().item() != expected_next_token([*TOKENS, 3])


def test_another_layout_is_refused():
    layout = KvLayout(1, 1, 4, torch.float16, 2)
    with pytest.raises(KernelArgumentError, match="layout"):
        HashToyRunner(CONFIG, layout.view(torch.zeros(layout.block_bytes, dtype=torch.uint8)), layout)
