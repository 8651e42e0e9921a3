"""Tokens and their log probabilities as OpenAI's and vLLM's clients read them.

A token is shown as its text; one that is a part of a character alone has U+FFFD in chats, whose `bytes` are exact, and the form
`bytes:\\xe4` in completions, as OpenAI has it.
"""

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from kvkeeper.client import TokenLogprobs

_LEAST = -9999.0  # what stands for minus infinity, which JSON cannot say
Pieces = Mapping[int, bytes]


def shown_ids(positions: Sequence[TokenLogprobs]) -> set[int]:
    """Tokens that are shown with these positions."""
    return {token for each in positions for token in (each.token_id, *(top for top, _ in each.top))}


def chat_logprobs(positions: Sequence[TokenLogprobs], pieces: Pieces) -> dict[str, Any]:
    """`logprobs` of a choice of a chat."""
    return {
        "content": [
            {**_token(each.token_id, each.logprob, pieces), "top_logprobs": [_token(*top, pieces) for top in each.top]}
            for each in positions
        ],
        "refusal": None,
    }


def _token(token_id: int, logprob: float, pieces: Pieces) -> dict[str, Any]:
    raw = pieces[token_id]
    return {"token": raw.decode(errors="replace"), "logprob": max(logprob, _LEAST), "bytes": list(raw)}


def count_tokens_within(texts: Sequence[str], spelled: Sequence[bytes]) -> int:
    """How many tokens have a part in some texts, which come one behind the other in what all the tokens spell."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    parts = [decoder.decode(piece) for piece in spelled]
    begins = [0, *accumulate(map(len, parts))][:-1]
    ends = [begin + max(len(part), 1) for begin, part in zip(begins, parts, strict=True)]  # a part of a character lies in it
    whole, place, num_tokens = "".join(parts), 0, 0
    for text in texts:
        if (first := whole.find(text, place)) >= 0:
            place = first + len(text)
            num_tokens += bisect_left(begins, place) - bisect_right(ends, first)
    return num_tokens


class CompletionLogprobs:
    """`logprobs` of a choice of a completion, from part to part: places in the text go on."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may have several tokens

    def add(self, positions: Sequence[TokenLogprobs | int], pieces: Pieces) -> dict[str, Any]:
        """positions: a token alone is the first of a prompt, which has no log probability."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for each in positions:
            token_id = each if isinstance(each, int) else each.token_id
            found["tokens"].append(_shown(pieces[token_id]))
            found["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(pieces[token_id]))
            found["token_logprobs"].append(None if isinstance(each, int) else max(each.logprob, _LEAST))
            found["top_logprobs"].append(None if isinstance(each, int) else _top(each, pieces))
        return found


def _top(each: TokenLogprobs, pieces: Pieces) -> dict[str, float]:
    """The likeliest, and the token itself."""
    return {_shown(pieces[token]): max(logprob, _LEAST) for token, logprob in (*each.top, (each.token_id, each.logprob))}


def _shown(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(positions: Sequence[TokenLogprobs], pieces: Pieces) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`, as vLLM has it: of each token of the prompt, the first of which has none."""
    return [None, *(_by_token(each, pieces) for each in positions)]


def _by_token(each: TokenLogprobs, pieces: Pieces) -> dict[str, Any]:
    ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(each.top, 1)]
    return {
        str(token): {"logprob": max(logprob, _LEAST), "rank": rank, "decoded_token": pieces[token].decode(errors="replace")}
        for token, logprob, rank in (*ranked, (each.token_id, each.logprob, each.rank))
    }
