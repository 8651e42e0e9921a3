"""What a request's client gets: chunks, value by value, and columns of the tokens that most of it is. Pure."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import EngineError
from .request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one position; names are the protocol's. rank 1 is the likeliest; equals share the better rank."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request that ended; names are the protocol's."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    copied_blocks: int
    num_preemptions: int

    def by_name(self) -> dict[str, int]:
        """The counts by name. Written out: asdict takes 30 times as long, and each request has this done at its end."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "new_tokens": self.new_tokens,
            "copied_blocks": self.copied_blocks,
            "num_preemptions": self.num_preemptions,
        }


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A part of one continuation's output. finish_reason is set on its last, usage on the request's last."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens from the second on, with its first chunk
    cumulative_logprob: float | None = None  # with the last, of continuations that were ranked


Send = Callable[[OutputChunk | EngineError], None]  # takes the output of a request, chunk by chunk, or the error that ends it


def joined(chunks: Sequence[OutputChunk]) -> OutputChunk:
    """All chunks of one continuation as one, with the last one's end."""
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        prompt_logprobs=tuple(chain.from_iterable(chunk.prompt_logprobs for chunk in chunks)),
    )


def coalesce(chunks: Sequence[OutputChunk]) -> list[OutputChunk]:
    """The same chunks in fewer: neighbours of one continuation become one. For a reader that is behind the loop."""
    runs: list[list[OutputChunk]] = []
    for chunk in chunks:
        if runs and runs[-1][-1].index == chunk.index:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return [joined(run) if len(run) > 1 else run[0] for run in runs]


_NUM_REQUESTS: Final = struct.Struct("<Q")
_COUNT = np.uint32  # as bytes, in the byte order of the machine that both ends are on


class TokenColumns(NamedTuple):
    """Tokens of R requests: the numbers that their reader knows them by, how many each has, and all, one behind the other."""

    numbers: npt.NDArray[np.uint64]  # [R]
    counts: npt.NDArray[np.integer]  # [R]
    token_ids: npt.NDArray[np.integer]  # [sum of counts]

    def to_bytes(self) -> bytes:
        counts, token_ids = self.counts.astype(_COUNT).tobytes(), self.token_ids.astype(_COUNT).tobytes()
        return b"".join((_NUM_REQUESTS.pack(len(self.numbers)), self.numbers.tobytes(), counts, token_ids))

    @classmethod
    def from_bytes(cls, body: bytes) -> "TokenColumns":
        """What to_bytes gave. Raises ValueError where the columns do not fit together."""
        (num_requests,) = _NUM_REQUESTS.unpack_from(body)
        numbers = np.frombuffer(body, np.uint64, num_requests, _NUM_REQUESTS.size)
        rest = np.frombuffer(body, _COUNT, offset=_NUM_REQUESTS.size + numbers.nbytes)
        columns = cls(numbers, rest[:num_requests], rest[num_requests:])
        if columns.counts.sum() != len(columns.token_ids) or len(columns.counts) != num_requests:
            raise ValueError("columns of different lengths")
        return columns


NO_TOKEN_COLUMNS = TokenColumns(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int32))
