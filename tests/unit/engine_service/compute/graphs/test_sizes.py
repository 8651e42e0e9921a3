"""The sizes that are captured, and the one that a batch takes."""

import pytest

from kvkeeper.engine_service.compute.graphs.step_sizes import MOST_PROMPTS, MOST_ROWS, StepSizes, graph_sizes, size_for


def test_small_sizes_singly_then_in_steps():
    assert graph_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert graph_sizes(256)[-3:] == [224, 240, 256]
    assert len(graph_sizes(256)) == 27


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 7, 8, 9, 127, 128, 129, 200, 255, 256, 511, 512, 1000, 65536])
def test_every_batch_up_to_the_limit_has_a_size_and_little_padding(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, MOST_ROWS)
    for rows in range(1, sizes[-1] + 1):
        size = size_for(rows, sizes)
        assert size is not None
        assert rows <= size <= max(rows + 7 if rows < 112 else rows + 15, 1)
    assert size_for(sizes[-1] + 1, sizes) is None


@pytest.mark.parametrize("most", [1, 5, 24, 64, 200, 512])
def test_every_step_with_prompts_has_a_size_up_to_its_limits(most):
    sizes = StepSizes(most, 1000)
    assert len(set(sizes)) == len(list(sizes)) <= len(sizes.decodes) + 5 * 8
    for decodes in range(most):
        for tokens in (2, 16, 17, 300, 999, 1000):
            prompts = min(most - decodes, tokens // 2, MOST_PROMPTS)
            size = sizes.find(decodes, tokens, prompts, decodes + prompts)
            assert size in set(sizes)
            assert decodes <= size.decodes
            assert tokens <= size.prompt_tokens <= max(4 * tokens, 16)
            assert decodes + prompts <= size.logits <= most
    assert sizes.find(0, 1001, 1, 1) is None, "more tokens"
    assert sizes.find(0, 1000, MOST_PROMPTS + 1, 1) is None, "more prompts"
    assert sizes.find(0, 1000, 1, most + 1) is None, "more logits"
    assert StepSizes(most, 0).find(0, 2, 1, 1) is None, "prompts are not captured"


def test_the_largest_step_is_captured_first():
    for sizes in (StepSizes(256, 8192), StepSizes(3, 0)):
        tokens = [size.decodes + size.prompt_tokens for size in sizes]
        assert tokens == sorted(tokens, reverse=True)
