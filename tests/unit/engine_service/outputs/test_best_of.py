"""Best of several continuations: which are told, in what order, and that nothing is told before the end."""

import numpy as np
import pytest

from kvkeeper.engine_service.outputs.best_of import BestOf, rank
from kvkeeper.engine_service.outputs.generation import Generation
from kvkeeper.engine_service.outputs.model_text import StopRules
from kvkeeper.engine_service.values.output_chunk import OutputChunk, TokenLogprobs, coalesce
from kvkeeper.engine_service.values.request import FinishReason, Request, RequestState
from kvkeeper.engine_service.values.sampling_params import GREEDY

EOS = 9


class Letters:
    """Text of a token is its number; what is odd comes one token late."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> tuple[str, bool]:
        text, self.held = (self.held, str(token_id)) if token_id % 2 else (self.held + str(token_id), "")
        return text, False

    def flush(self) -> str:
        return self.held


def make(n: int, best_of: int, max_tokens: int, num_logprobs: int | None = None) -> tuple[Generation, list[OutputChunk]]:
    told: list[OutputChunk] = []
    request = Request("r", np.arange(3, dtype=np.int32), max_tokens, n=best_of)
    outputs = [Letters() for _ in range(best_of)]
    stop = StopRules(frozenset({EOS}))
    generation = Generation(
        request, GREEDY, 0, stop, outputs, told.append, num_logprobs=num_logprobs, best_of=BestOf(n)  # type: ignore[arg-type]
    )  # fmt: skip
    return generation, told


def of(token_id: int, logprob: float) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 1, (), ())


def take(generation: Generation, index: int, *tokens: tuple[int, float]) -> None:
    for token_id, logprob in tokens:
        generation.take_token(index, token_id, of(token_id, logprob))
    generation.deliver()


def test_ranked_by_the_mean_and_not_by_the_sum() -> None:
    assert rank({0: [-1.0], 1: [-0.6, -0.6], 2: [-0.1, -3.0]}, 3) == [1, 0, 2]
    assert rank({0: [-1.0], 1: [-1.0], 2: [-0.5]}, 2) == [2, 0], "of equals the first"
    assert rank({0: [], 1: [-50.0]}, 2) == [1, 0], "without a token is last"


@pytest.mark.parametrize(("asked", "drawn"), [(None, 0), (3, 3)])
def test_the_sampler_is_asked_for_what_ranking_needs(asked: int | None, drawn: int) -> None:
    generation, _ = make(n=1, best_of=2, max_tokens=2, num_logprobs=asked)
    assert generation.sampling_row(0, np.arange(3, dtype=np.int32)).num_logprobs == drawn
    generation.best_of = None
    assert generation.sampling_row(0, np.arange(3, dtype=np.int32)).num_logprobs == asked


def test_cancelled_it_tells_as_many_as_promised_as_far_as_they_came() -> None:
    generation, told = make(n=2, best_of=3, max_tokens=5)
    take(generation, 1, (2, -1.0))
    generation.cancel()
    assert [(chunk.index, chunk.token_ids, chunk.finish_reason) for chunk in told] == [
        (0, (2,), FinishReason.CANCELLED),
        (1, (), FinishReason.CANCELLED),
    ]
    assert told[-1].usage is not None
    assert generation.state is RequestState.CANCELLED


def test_joined_chunks_keep_everything() -> None:
    chunks = [
        OutputChunk(0, "a", (1,)),
        OutputChunk(0, "b", (2,)),
        OutputChunk(1, "c", (3,)),
        OutputChunk(0, "d", (4,), cumulative_logprob=-1.0),
    ]
    assert coalesce(chunks) == [OutputChunk(0, "ab", (1, 2)), OutputChunk(1, "c", (3,)), chunks[3]]
