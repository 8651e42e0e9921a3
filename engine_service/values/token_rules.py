"""TokenRules: what a request says of single tokens: which may be drawn, and by how much each is favoured. Pure.

Rules hold whatever the model says, at any temperature. A change is a number that is added to one token's logit; minus infinity
forbids the token. What the step before draws may not be known yet: a change that follows from it names the token that it has to
be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ANY_TOKEN = -1


class TokenChanges(NamedTuple):
    """Changes of K logits of a row.

    Attributes:
        token_ids: int64 [K]. amounts: float32 [K], what is added.
        needed: int64 [K], what the awaited token has to be for the change to be made, or ANY_TOKEN.
    """

    token_ids: npt.NDArray[np.int64]
    amounts: npt.NDArray[np.float32]
    needed: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """The rules of one request.

    Attributes:
        bias: by token id.
        allowed: int32 [A], the only tokens that may be drawn; None: all may.
        bad_words: token lists, none empty. The last token of one is not drawn behind its other tokens in the output.
        min_tokens: output tokens before which none of ending_ids is drawn.
    """

    bias: Mapping[int, float]
    allowed: npt.NDArray[np.int32] | None
    bad_words: Sequence[tuple[int, ...]]
    min_tokens: int
    ending_ids: frozenset[int]

    def changes(self, output: npt.NDArray[np.integer], *, is_awaited: bool) -> TokenChanges:
        """What they change behind this output, and behind one token more that is awaited."""
        forbidden: list[tuple[int, int]] = []
        if len(output) + is_awaited < self.min_tokens:
            forbidden += [(token_id, ANY_TOKEN) for token_id in self.ending_ids]
        longest = max(map(len, self.bad_words), default=1) - 1
        end = output[max(0, len(output) - longest) :].tolist()
        for *before, last in self.bad_words:
            needed = before.pop() if before and is_awaited else ANY_TOKEN
            if len(before) <= len(end) and end[len(end) - len(before) :] == before:
                forbidden.append((last, needed))
        columns = np.array([*((token_id, ANY_TOKEN) for token_id in self.bias), *forbidden], np.int64).reshape(-1, 2).T
        amounts = np.array([*self.bias.values(), *(-np.inf for _ in forbidden)], np.float32)
        return TokenChanges(columns[0], amounts, columns[1])
