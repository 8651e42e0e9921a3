"""Asking for the same output again after the engine went away, and taking only what is new of it: pure.

A request's tokens are a function of its prompt, parameters and seed, so the same request with the same seed spells what was
received before and then goes on. What is new is found by counting, for each continuation, its tokens and its characters.
"""

import secrets
import uuid
from collections import Counter
from dataclasses import dataclass, field, replace

from kvkeeper.client.engine_calls import GenerateOptions, OutputChunk
from kvkeeper.client.errors import KvkeeperError

PAUSE_S = 0.1


def repeatable(options: GenerateOptions) -> GenerateOptions:
    """The same with an id and a seed, where the service would have drawn them."""
    if not options.resubmit_s:
        return options
    seed = secrets.randbits(63) if options.sampling.seed is None else options.sampling.seed
    request_id = options.request_id or str(uuid.uuid4())
    return replace(options, request_id=request_id, sampling=replace(options.sampling, seed=seed))


@dataclass
class Received:
    """What has come of one request, over however many attempts."""

    resubmit_s: float
    _tokens: Counter[int] = field(default_factory=Counter)  # by continuation
    _chars: Counter[int] = field(default_factory=Counter)
    _ended: set[int] = field(default_factory=set)
    _has_prompt_logprobs: bool = False
    _tokens_now: Counter[int] = field(default_factory=Counter)  # of the attempt under way
    _chars_now: Counter[int] = field(default_factory=Counter)
    _give_up_at: float = 0.0
    _num_attempts: int = 1

    def new_part(self, piece: OutputChunk) -> OutputChunk | None:
        """What of a piece has not come before; None for nothing."""
        index = piece.index
        old_tokens = max(0, self._tokens[index] - self._tokens_now[index])
        old_chars = max(0, self._chars[index] - self._chars_now[index])
        self._tokens_now[index] += len(piece.token_ids)
        self._chars_now[index] += len(piece.text)
        if index in self._ended:
            return None
        self._tokens[index] = max(self._tokens[index], self._tokens_now[index])
        self._chars[index] = max(self._chars[index], self._chars_now[index])
        if piece.finish_reason is not None:
            self._ended.add(index)
        prompt_logprobs = () if self._has_prompt_logprobs else piece.prompt_logprobs
        self._has_prompt_logprobs |= bool(piece.prompt_logprobs)
        self._give_up_at = 0.0
        new = replace(
            piece,
            text=piece.text[old_chars:],
            token_ids=piece.token_ids[old_tokens:],
            logprobs=piece.logprobs[old_tokens:],
            prompt_logprobs=prompt_logprobs,
        )
        return new if new.text or new.token_ids or new.prompt_logprobs or new.finish_reason is not None else None

    def may_ask_again(self, error: KvkeeperError, now: float) -> bool:
        """Whether the request is to be sent once more after PAUSE_S; now is of any monotone clock."""
        # Its cancellation may not have reached an engine that lives and lost the connection only.
        is_transient = error.unavailable or (error.reason == "DUPLICATE_REQUEST" and self._num_attempts > 1)
        if not self.resubmit_s or not is_transient:
            return False
        self._give_up_at = self._give_up_at or now + self.resubmit_s
        if now + PAUSE_S > self._give_up_at:
            return False
        self._num_attempts += 1
        self._tokens_now.clear()
        self._chars_now.clear()
        return True
