"""Continuing a request's output after its stream broke, and taking only the new part of it: pure.

There are two ways. A submitted request goes on without its client, and a request that another engine took over waits there for
its client: either is followed from where it was (StreamRequest). Any other request ends with its stream, and is sent again. Its
tokens are a function of its prompt, parameters and seed, so the same
request with the same seed repeats what was received before and then goes on. The new part is found by counting each
continuation's tokens and characters.
"""

import secrets
import uuid
from collections import defaultdict
from dataclasses import dataclass, field, replace

from kvkeeper.client.engine.calls import GenerateOptions, OutputChunk
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.engine.v1 import engine_service_pb2 as pb

PAUSE_S = 0.1


def repeatable(options: GenerateOptions) -> GenerateOptions:
    """The same options with an id and a seed, which otherwise the service would draw."""
    if not options.resubmit_s:
        return options
    seed = secrets.randbits(63) if options.sampling.seed is None else options.sampling.seed
    request_id = options.request_id or str(uuid.uuid4())
    return replace(options, request_id=request_id, sampling=replace(options.sampling, seed=seed))


@dataclass(slots=True)
class _Part:
    """How much of a continuation has come in all, and in the attempt under way."""

    num_tokens: int = 0
    num_chars: int = 0
    num_tokens_now: int = 0
    num_chars_now: int = 0
    has_ended: bool = False


@dataclass
class Received:
    """What one request has received over all its attempts.

    resubmit_s: seconds to ask again after the engine went away; is_submitted: the request goes on meanwhile.
    address: of the engine that took the request over; empty: of the client's own.
    request_id: of the request to follow. is_followed: the next stream goes on behind what is here.
    """

    resubmit_s: float
    is_submitted: bool = False
    request_id: str = ""
    address: str = ""
    is_followed: bool = False
    _parts: defaultdict[int, _Part] = field(default_factory=lambda: defaultdict(_Part))  # by continuation
    _has_prompt_logprobs: bool = False
    _give_up_at: float = 0.0
    _num_attempts: int = 1

    def new_part(self, chunk: OutputChunk) -> OutputChunk | None:
        """The part of a chunk that was not received before; None where all of it was."""
        part = self._parts[chunk.index]
        if part.has_ended:
            return None
        old_tokens, old_chars = part.num_tokens - part.num_tokens_now, part.num_chars - part.num_chars_now
        part.num_tokens_now += len(chunk.token_ids)
        part.num_chars_now += len(chunk.text)
        if part.num_tokens_now > part.num_tokens:
            part.num_tokens = part.num_tokens_now
        if part.num_chars_now > part.num_chars:
            part.num_chars = part.num_chars_now
        part.has_ended = chunk.finish_reason is not None
        prompt_logprobs = () if self._has_prompt_logprobs else chunk.prompt_logprobs
        self._has_prompt_logprobs |= bool(chunk.prompt_logprobs)
        self._give_up_at = 0.0
        new = chunk
        if old_tokens or old_chars or prompt_logprobs != chunk.prompt_logprobs:
            new = replace(
                chunk,
                text=chunk.text[old_chars:],
                token_ids=chunk.token_ids[old_tokens:],
                logprobs=chunk.logprobs[old_tokens:],
                prompt_logprobs=prompt_logprobs,
            )
        return new if new.text or new.token_ids or new.prompt_logprobs or new.finish_reason is not None else None

    def outputs(self) -> list[pb.ReceivedOutput]:
        """How much of each continuation is here, for a stream that goes on behind it."""
        return [
            pb.ReceivedOutput(index=index, num_tokens=part.num_tokens, has_ended=part.has_ended)
            for index, part in sorted(self._parts.items())
        ]

    def may_follow(self, error: KvkeeperError) -> bool:
        """Whether to follow the request at once, to the engine that took it over."""
        moved_to = address_in(error)
        if not moved_to:
            return False
        self.address, self.request_id = moved_to, error.metadata.get("request_id", self.request_id)
        self._go_on(is_followed=True)
        return True

    def may_ask_again(self, error: KvkeeperError, now: float) -> bool:
        """Whether to ask once more after PAUSE_S; now is the time of any monotone clock."""
        # Where only the connection was lost, the first attempt's cancellation may not have reached the engine yet.
        is_transient = error.unavailable or (error.reason == "DUPLICATE_REQUEST" and self._num_attempts > 1)
        # A request that was taken over ended with the engine that had it.
        is_transient |= error.reason == "UNKNOWN_REQUEST" and self.is_followed and not self.is_submitted
        if not self.resubmit_s or not is_transient:
            return False
        self._give_up_at = self._give_up_at or now + self.resubmit_s
        if now + PAUSE_S > self._give_up_at:
            return False
        self._num_attempts += 1
        self._go_on(is_followed=self.is_submitted)
        return True

    def _go_on(self, *, is_followed: bool) -> None:
        self.is_followed = is_followed
        for part in self._parts.values():
            part.num_tokens_now = part.num_tokens if is_followed else 0
            part.num_chars_now = part.num_chars if is_followed else 0


def address_in(error: KvkeeperError) -> str:
    """The address of the engine that took over the request that the error is about; empty: none did."""
    return error.metadata.get("address", "") if error.reason == "REQUEST_MOVED" else ""
