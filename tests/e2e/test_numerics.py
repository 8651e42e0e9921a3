"""Teacher-forced logits through the cache service's shared memory against transformers.

Scheduler, client, cache service, arena and model are the real ones; only the sampler is replaced by a teacher that says
each next token. Chunks, prefix hits, forks and preemptions happen on the way, and every logits row that was computed is
compared. The bound is that of docs/inside/reliability.md: 1e-5, and 5 times transformers' own difference between eager and SDPA
attention in the same run.
"""

import dataclasses
import itertools
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np
import pytest
import torch

from kvkeeper.client import AsyncCacheClient
from kvkeeper.engine_service.cache_session.kv_memory import KvMemory, open_memory
from kvkeeper.engine_service.cache_session.pool_limits import make_limits
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.scheduler.scheduler import Scheduler
from kvkeeper.engine_service.values.request import Request, Sequence
from tests.support.models.tiny_models import (
    NumericsCase,
    ReferenceLogits,
    build_model_folder,
    random_tokens,
    reference_logits,
    tiny_model,
)
from tests.support.processes.service_pair import Services

pytestmark = pytest.mark.each_value
BLOCK_SIZE = 4
NUM_NEW = 2 * BLOCK_SIZE + 1
NUM_CONTINUATIONS = 3
PROMPT_LENS = [k * BLOCK_SIZE + off for k in (1, 2, 3) for off in (-1, 0, 1)]


@dataclasses.dataclass(frozen=True, slots=True)
class Lessons:
    """Prompts, what the teacher says after each, and transformers' logits of both together."""

    model: ServedModel
    prompts: tuple[tuple[int, ...], ...]
    cases: dict[tuple[int, int], NumericsCase]  # by prompt and continuation
    reference: ReferenceLogits

    def eager(self, prompt: int, continuation: int) -> torch.Tensor:
        return self.reference.eager[list(self.cases).index((prompt, continuation))]


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        "mistral_window",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "phi3_longrope_partial",
        "gemma2",
        "gemma3",
        "gemma4_e2b",
        "gemma4_12b",
        "gemma4_26b",
        "qwen2_window",
        "gpt_oss",
        "llama4",
        "deepseek_v3",
    ],
)
def lessons(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lessons:
    folder: Path = build_model_folder(tmp_path_factory.mktemp("model"), tiny_model(request.param))
    prompts = tuple(tuple(random_tokens(length, seed=length)) for length in PROMPT_LENS)
    cases = {
        (prompt, index): NumericsCase((*tokens, *random_tokens(NUM_NEW, seed=100 * prompt + index)))
        for (prompt, tokens), index in itertools.product(enumerate(prompts), range(NUM_CONTINUATIONS))
    }
    model = load_served_model(EngineConfig(model=str(folder), progress=False))
    return Lessons(model, prompts, cases, reference_logits(folder, list(cases.values())))


class Class:
    """Teaches requests on one session: a loop without a sampler."""

    def __init__(self, lessons: Lessons, memory: KvMemory, config: EngineConfig) -> None:
        self.lessons = lessons
        self.memory = memory
        self.scheduler = Scheduler(make_limits(memory.session.pool, lessons.model, config))
        self.prompt_of: dict[Request, int] = {}
        self.worst = 0.0
        self.num_rows = 0
        self.last: dict[tuple[int, int, int], torch.Tensor] = {}  # by prompt, continuation, position

    async def teach(self, prompts: SequenceOf[int], n: int = 1) -> list[Request]:
        """Compute these prompts and their first n continuations."""
        requests = []
        for prompt in prompts:
            tokens = np.array(self.lessons.prompts[prompt], np.int32)
            requests.append(Request(f"r{prompt}", tokens, NUM_NEW, n=n))
            self.prompt_of[requests[-1]] = prompt
            self.scheduler.add(requests[-1], 0.0)
        for _ in range(2000):
            if self.scheduler.is_empty:
                return requests
            await self._step()
        raise AssertionError("starvation")

    async def _step(self) -> None:
        while (sequence := self.scheduler.next_to_create()) is not None:
            assert sequence.sequence_id is not None
            await self.memory.session.create_sequence(sequence.sequence_id, sequence.token_ids, sequence.request.max_len)
            self.scheduler.waiting.created(sequence)
        plan = self.scheduler.schedule(0.0)
        work = self.scheduler.apply(plan, await self.memory.step(plan))
        self.memory.runner.copy_blocks(work.copies)
        if work.batch is None:
            return
        num_tokens = len(work.batch.token_ids)
        batch = dataclasses.replace(work.batch, logit_rows=np.arange(num_tokens), logit_start_loc=work.batch.query_start_loc)
        logits = self.memory.runner.forward(batch)
        for row, sequence in enumerate(self.scheduler.running.at(work.rows)):
            first, last = batch.query_start_loc[row : row + 2].tolist()
            self._compare(sequence, batch.positions[first:last].tolist(), logits[first:last])
        self.scheduler.advance(work, np.array([self._next_token(sequence) for sequence in work.sampled], np.int32))
        for sequence in work.sampled:
            if sequence.num_output == NUM_NEW:
                self.scheduler.end_sequence(sequence)

    def _compare(self, sequence: Sequence, positions: list[int], logits: torch.Tensor) -> None:
        prompt = self.prompt_of[sequence.request]
        expected = self.lessons.eager(prompt, sequence.index)[positions]
        assert torch.isfinite(logits).all()
        self.worst = max(self.worst, float((logits - expected).abs().max()))
        self.num_rows += len(positions)
        for position, row in zip(positions, logits, strict=True):
            self.last[prompt, sequence.index, position] = row.clone()  # the next step may use its memory

    def _next_token(self, sequence: Sequence) -> int:
        prompt = self.prompt_of[sequence.request]
        tokens = self.lessons.cases[prompt, sequence.index].tokens
        return tokens[len(self.lessons.prompts[prompt]) + sequence.num_output]


async def open_class(world: Services, lessons: Lessons, client: AsyncCacheClient, **options: int) -> Class:
    config = EngineConfig(block_size=BLOCK_SIZE, **options)  # type: ignore[arg-type]
    memory = await open_memory(client, lessons.model, config)
    world.defer(memory.close)
    return Class(lessons, memory, config)


@pytest.mark.parametrize("chunk_size", [1, 7, BLOCK_SIZE, 64])
async def test_chunks_hits_and_forks(world: Services, lessons: Lessons, chunk_size: int) -> None:
    await world.start_cache(num_blocks=200 * max(2, len(lessons.model.groups)))
    pupil = await open_class(world, lessons, await world.cache_client(), chunk_size=chunk_size)
    everything = range(len(PROMPT_LENS))
    cold = await pupil.teach(everything, n=NUM_CONTINUATIONS)
    num_cold = pupil.num_rows
    warm = await pupil.teach(everything)
    assert pupil.worst <= lessons.reference.bound
    num_new = NUM_NEW - 1  # the last token's logits are not used
    assert num_cold == sum(length + NUM_CONTINUATIONS * num_new for length in PROMPT_LENS), "each prompt once"
    assert [request.num_hit_tokens for request in cold] == [0] * len(cold)
    assert [request.num_hit_tokens for request in warm] == [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in PROMPT_LENS]
    partial = sum(length % BLOCK_SIZE > 0 for length in PROMPT_LENS)
    num_tables = max(len(lessons.model.groups), 1)
    assert sum(request.num_copied_blocks for request in cold) == partial * (NUM_CONTINUATIONS - 1) * num_tables


async def test_preemptions(world: Services, lessons: Lessons) -> None:
    await world.start_cache(num_blocks=8 * max(2, len(lessons.model.groups)))
    pupil = await open_class(world, lessons, await world.cache_client(), chunk_size=7)
    await pupil.teach([5, 6, 7, 8], n=2)
    assert pupil.worst <= lessons.reference.bound
    assert pupil.scheduler.state.num_preemptions > 0


async def test_a_second_engine_hits_and_its_logits_are_the_same(world: Services, lessons: Lessons) -> None:
    await world.start_cache(num_blocks=200 * max(2, len(lessons.model.groups)))
    client = await world.cache_client()
    first, second = await open_class(world, lessons, client), await open_class(world, lessons, client)
    await first.teach([6, 7, 8])
    shared = await second.teach([6, 7, 8])
    assert [request.num_hit_tokens for request in shared] == [8, 8, 12]
    assert max(first.worst, second.worst) <= lessons.reference.bound
    difference = max(float((first.last[key] - row).abs().max()) for key, row in second.last.items())
    assert difference <= lessons.reference.bound
