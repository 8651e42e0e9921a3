"""Replays prompts against a pool of a hybrid model, whose hits end where states are kept; and the loads that this is about.

A request is its tokens, of which the first `num_asked` may be found: the others are its reply. Each is computed alone, by an
engine that takes partial blocks. A block stands for about 350 tokens of a model of 30 recurrent and 10 attending layers, and a
state takes as many blocks as there are groups of states.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.kv_spec import WHOLE, state_span
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId

_SESSION = SessionId("replay")
_BLOCK_SIZE, _CHECKPOINT_BLOCKS, _MOST_TOKENS = 8, 24, 1 << 13
_ALL = 1 << 20


class Prompt(NamedTuple):
    """One request."""

    tokens: list[int]
    num_asked: int


class StateReplay:
    """One pool with so many groups of states, and one sequence at a time."""

    def __init__(self, num_blocks: int, policy: str, num_state_groups: int = 3) -> None:
        spans = (WHOLE, *[state_span(_CHECKPOINT_BLOCKS)] * num_state_groups)
        sizes: dict[str, Any] = {"max_sequences": 8, "max_tokens_per_sequence": _MOST_TOKENS, "watermark": 0.0}
        self.manager = PoolManager(PoolConfig(num_blocks + 2, _BLOCK_SIZE, eviction_policy=policy, group_spans=spans, **sizes))
        self.manager.sessions.open(_SESSION, Executor.ENGINE, takes_partial=True)
        self._num_steps = self._num_sequences = self._num_asked = self._num_hit = 0

    @property
    def hit_rate(self) -> float:
        """Tokens that were found of those that could have been."""
        return self._num_hit / max(self._num_asked, 1)

    def run(self, prompts: Sequence[Prompt]) -> "StateReplay":
        for prompt in prompts:
            self._run(prompt)
        return self

    def _run(self, prompt: Prompt) -> None:
        self._num_sequences += 1
        ids, length = np.array([self._num_sequences]), len(prompt.tokens)
        self.manager.creation.create(_SESSION, SequenceArgs(SequenceId(self._num_sequences), np.array(prompt.tokens, np.int32)))
        reply = self._step(start_ids=ids, start_max_new=_int32(_ALL), start_max_hit=_int32(_ALL))
        self._num_hit += min(int(reply.start_hits[0]), prompt.num_asked)
        self._num_asked += prompt.num_asked
        reserved = int(reply.start_reserved[0])
        while reserved < length:  # a grant ends where prompts part
            commit = {"commit_ids": ids, "commit_lens": _int32(reserved), "commit_num_new": _int32(0)}
            reply = self._step(**commit, reserve_ids=ids, reserve_min=_int32(reserved + 1), reserve_max=_int32(length))
            reserved = int(reply.reserve_reserved[0])
        self._step(commit_ids=ids, commit_lens=_int32(length), commit_num_new=_int32(0))
        self._step(release_ids=ids)
        self._step()

    def _step(self, **columns: np.ndarray) -> StepReply:
        self._num_steps += 1
        reply = self.manager.steps.step(_SESSION, StepBatch(self._num_steps, self._num_steps - 1, **columns))
        self.manager.maintenance.publish_pending()
        self.manager.maintenance.do_due_work()
        return reply


def _int32(number: int) -> np.ndarray:
    return np.array([number], np.int32)


class _Tokens:
    """Tokens that were never there before."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def take(self, count: int) -> list[int]:
        return list(itertools.islice(self._next, count))


def chats(seed: int, num_prompts: int) -> list[Prompt]:
    """Conversations of 30 users under one system prompt, one in five of which begins with a document."""
    rng, fresh = random.Random(seed), _Tokens()
    system, talks, prompts = fresh.take(68), dict[int, list[int]](), list[Prompt]()
    for _ in range(num_prompts):
        user = rng.randrange(30)
        if user not in talks or rng.random() > 0.85:
            talks[user] = [*system, *fresh.take(rng.randint(45, 450) if rng.random() < 0.2 else rng.randint(1, 7))]
        else:
            talks[user] = [*talks[user], *fresh.take(rng.randint(1, 7))]
        prompts.append(Prompt([*talks[user], *fresh.take(rng.randint(2, 18))], len(talks[user])))
        talks[user] = prompts[-1].tokens
    return prompts


def agents(seed: int, num_prompts: int) -> list[Prompt]:
    """Agents under five tool prompts, each with about ten steps; between them questions that are not asked again."""
    rng, fresh = random.Random(seed), _Tokens()
    tools, running, prompts = [fresh.take(90) for _ in range(5)], list[list[int]](), list[Prompt]()
    while len(prompts) < num_prompts:
        if len(running) < 16:
            running.append([*rng.choice(tools), *fresh.take(rng.randint(3, 30))])
        if rng.random() < 0.3:
            question = fresh.take(rng.randint(5, 120))
            prompts.append(Prompt(question, len(question) - 2))
        which = rng.randrange(len(running))
        prompts.append(Prompt([*running[which], *fresh.take(rng.randint(1, 6))], len(running[which])))
        running[which] = [*prompts[-1].tokens, *fresh.take(rng.randint(2, 22))]
        if rng.random() < 0.1:
            del running[which]
    return prompts


def lengths(seed: int, num_prompts: int) -> list[Prompt]:
    """Short conversations and long ones, which go on equally often."""
    rng, fresh = random.Random(seed), _Tokens()
    talks, prompts = dict[int, list[int]](), list[Prompt]()
    for _ in range(num_prompts):
        user = rng.randrange(24)
        is_long = user % 3 == 0
        if user not in talks or rng.random() > 0.9:
            talks[user] = fresh.take(rng.randint(200, 600) if is_long else rng.randint(5, 20))
        prompts.append(Prompt([*talks[user], *fresh.take(rng.randint(2, 10))], len(talks[user])))
        talks[user] = [*prompts[-1].tokens, *fresh.take(rng.randint(20, 80) if is_long else rng.randint(1, 8))]
    return prompts


def asked_again(seed: int, num_prompts: int) -> list[Prompt]:
    """Conversations in which a third of the turns is asked again, for another reply."""
    rng, fresh = random.Random(seed), _Tokens()
    talks, prompts = dict[int, Prompt](), list[Prompt]()
    for _ in range(num_prompts):
        user = rng.randrange(24)
        last = talks.get(user)
        if last is None or rng.random() > 0.9:
            asked = fresh.take(rng.randint(20, 200))
        elif rng.random() < 0.35:
            asked = last.tokens[: last.num_asked]
        else:
            asked = [*last.tokens, *fresh.take(rng.randint(1, 7))]
        talks[user] = Prompt([*asked, *fresh.take(rng.randint(2, 18))], len(asked))
        prompts.append(talks[user])
    return prompts


def documents(seed: int, num_prompts: int) -> list[Prompt]:
    """80 documents by popularity under one system prompt, and questions that are not asked again."""
    rng, fresh = random.Random(seed), _Tokens()
    system, texts, prompts = fresh.take(40), [fresh.take(120) for _ in range(80)], list[Prompt]()
    for text in rng.choices(texts, [1 / (rank + 1) ** 0.9 for rank in range(80)], k=num_prompts):
        if rng.random() < 0.3:
            prompts.append(Prompt(fresh.take(rng.randint(5, 150)), 3))
        asked = [*system, *text, *fresh.take(rng.randint(1, 15))]
        prompts.append(Prompt([*asked, *fresh.take(5)], len(asked)))
    return prompts


def cycle(seed: int, num_prompts: int) -> list[Prompt]:
    """24 documents in turn, again and again; the seed moves the start."""
    fresh = _Tokens()
    texts = [fresh.take(150) for _ in range(24)]
    return [Prompt([*texts[(seed + at) % 24], *fresh.take(6)], 153) for at in range(num_prompts)]


LOADS: dict[str, Callable[[int, int], list[Prompt]]] = {
    "chats": chats,
    "agents": agents,
    "lengths": lengths,
    "asked_again": asked_again,
    "documents": documents,
    "cycle": cycle,
}
# Blocks of pools that are short of each load.
NUM_BLOCKS = {"chats": 490, "agents": 620, "lengths": 700, "asked_again": 330, "documents": 230, "cycle": 215}
