"""What clients asked and what came, in the order in which they saw it; and what of it cannot be right.

The oracle is handed in: it tells the tokens behind a prompt. Two tenants ask the same prompts, so one that is told of cached
tokens which only the other has had was shown another tenant's blocks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

Oracle = Callable[[tuple[int, ...]], list[int]]


class What(StrEnum):
    """What a client did or saw."""

    ASKED = "asked"
    TOKENS = "tokens"
    COMPLETED = "completed"
    CUT = "cut"  # its engine was killed, and it did not ask again
    REFUSED = "refused"  # before anything of it came
    FAULT = "fault"  # of a service that it waits for


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a history. tokens: of ASKED the prompt, of TOKENS those that came, for the continuation `index`."""

    what: What
    request_id: str
    tenant: str = ""
    tokens: tuple[int, ...] = ()
    index: int = 0
    num_outputs: int = 1  # of ASKED, with the tokens of each
    num_tokens: int = 0
    num_cached: int = 0  # of COMPLETED


class _Request:
    """One request, as far as the history has been read."""

    def __init__(self, asked: Event) -> None:
        self.asked = asked
        self.outputs: list[list[int]] = [[] for _ in range(asked.num_outputs)]
        self.end: What | None = None
        self.has_faults = False


def violations(history: list[Event], oracle: Oracle, block_size: int) -> list[str]:
    """What cannot be, in words; empty for a history that may be."""
    return list(_Reading(oracle, block_size).read(history))


class _Reading:
    """One pass over a history."""

    def __init__(self, oracle: Oracle, block_size: int) -> None:
        self._oracle, self._block_size = oracle, block_size
        self._requests: dict[str, _Request] = {}

    def read(self, history: list[Event]) -> Iterator[str]:
        for event in history:
            request = self._requests.get(event.request_id)
            if event.what is What.ASKED:
                if request is not None:
                    yield f"{event.request_id} was asked twice"
                self._requests[event.request_id] = _Request(event)
            elif request is None:
                yield f"{event.request_id}: {event.what} of a request that was never asked"
            elif request.end is not None:
                yield f"{event.request_id}: {event.what} behind its end"
            else:
                yield from self._follow(request, event)
        yield from (f"{name} never ended" for name, request in self._requests.items() if request.end is None)

    def _follow(self, request: _Request, event: Event) -> Iterator[str]:
        name, asked = event.request_id, request.asked
        if event.what is What.FAULT:
            request.has_faults = True
        elif event.what is What.TOKENS:
            output = request.outputs[event.index]
            expected = self._oracle(asked.tokens)[len(output) : len(output) + len(event.tokens)]
            if list(event.tokens) != expected:
                yield f"{name}: {list(event.tokens)} at {len(output)} of {event.index}, not {expected}"
            output += event.tokens
        else:
            request.end = event.what
            if event.what is What.REFUSED and any(request.outputs):
                yield f"{name} was refused when tokens of it had come"
            if event.what is What.CUT and not request.has_faults:
                yield f"{name} was cut, and nothing had been broken"
            if event.what is What.COMPLETED:
                if [len(output) for output in request.outputs] != [asked.num_tokens] * asked.num_outputs:
                    yield f"{name} ended with {[len(output) for output in request.outputs]} of {asked.num_tokens} tokens"
                yield from self._check_cached(request, event)

    def _check_cached(self, request: _Request, event: Event) -> Iterator[str]:
        """What was cached for it was computed for its own tenant. Behind a fault it may find what it had computed itself."""
        asked = request.asked
        if request.has_faults:
            return
        others = (other for other in self._requests.values() if other is not request and other.asked.tenant == asked.tenant)
        most = max((self._common(other, asked.tokens) for other in others), default=0)
        if event.num_cached > most:
            yield f"{event.request_id}: {event.num_cached} cached tokens, where its tenant had {most} of its prompt"

    def _common(self, other: _Request, prompt: tuple[int, ...]) -> int:
        """Tokens at the beginning of the prompt that the other request had, too, in whole blocks."""
        known = [*other.asked.tokens, *self._oracle(other.asked.tokens)]
        count = next((i for i, pair in enumerate(zip(known, prompt, strict=False)) if pair[0] != pair[1]), len(prompt))
        return count // self._block_size * self._block_size
