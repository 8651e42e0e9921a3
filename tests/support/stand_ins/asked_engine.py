"""AskedEngine: a client of an engine that answers with given texts, and remembers what it was asked."""

from typing import Any

from kvkeeper.client import OutputChunk, TokenLogprobs, Usage
from kvkeeper.client.engine.calls import generate_request, tokenize_request

LOGPROBS = TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, -1.0)))  # of each token, where they are asked for


class AskedEngine:
    """text: of each answer, a token for each part of it."""

    def __init__(self, *text: str, reason: str = "end_of_sequence") -> None:
        self.text, self.reason = text, reason
        self.asked: list[Any] = []
        self.usage = Usage(12, 8, len(text), 0, 0)

    async def tokenize(self, prompt: Any) -> tuple[int, ...]:
        self.asked.append(tokenize_request(prompt))
        return (1, 2, 3)

    async def pieces(self, token_ids: Any) -> list[bytes]:
        return [b"t" for _ in token_ids]

    def generate(self, prompt: Any, options: Any) -> "AskedEngine":
        self.asked.append(generate_request(prompt, options))
        return self

    async def __aenter__(self) -> "AskedEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __aiter__(self) -> Any:
        for place, part in enumerate(self.text):
            reason = self.reason if place == len(self.text) - 1 else None
            has_logprobs = self.asked[-1].sampling.HasField("num_logprobs")
            yield OutputChunk(0, part, (place,), reason, (LOGPROBS,) if has_logprobs else ())

    async def close(self) -> None:
        pass
