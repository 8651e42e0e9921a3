"""Best of several: which continuations of a prompt the client gets, and in what order.

Continuations are ranked by their mean log probability per token in the model's own distribution, so that a long one does not
lose by its length alone. The token that ended a continuation counts although the client does not get it. Pure.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..values.output_chunk import OutputChunk, joined


def rank(logprobs: Mapping[int, Sequence[float]], num_returned: int) -> list[int]:
    """Indices of the best continuations, the best first, equals by index. logprobs: of the tokens of each continuation."""

    def mean(index: int) -> float:
        own = logprobs[index]
        return sum(own) / len(own) if own else float("-inf")

    return sorted(logprobs, key=lambda index: (-mean(index), index))[:num_returned]


@dataclass(slots=True)
class BestOf:
    """Keeps the output of all continuations until the last one has ended."""

    num_returned: int
    _chunks: dict[int, list[OutputChunk]] = field(default_factory=lambda: defaultdict(list))
    _logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def count(self, index: int, logprob: float) -> None:
        """A continuation's next token has this log probability."""
        self._logprobs[index].append(logprob)

    def hold(self, chunk: OutputChunk) -> None:
        """Keep a chunk until the end."""
        self._chunks[chunk.index].append(chunk)

    def best(self) -> list[OutputChunk]:
        """One chunk for each of the best, numbered by rank."""
        best = rank({index: self._logprobs[index] for index in sorted(self._chunks)}, self.num_returned)
        return [
            replace(joined(self._chunks[index]), index=place, cumulative_logprob=sum(self._logprobs[index]))
            for place, index in enumerate(best)
        ]
