"""TextWork: the work of the tokenizer, the chat template and the grammars of constraints, without blocking the loop.

Short text is done at once, everything else in worker processes (workers.py): every chat too, because its template is a program
of the model folder. Short chats have a process of their own, so that none waits for long texts. Text is bounded first: by the
tokens that the model can take, each with more bytes than tokens usually have. A job that takes too much is refused, and no part
of it enters this process; a constraint that passes is compiled here again, in a thread that releases the interpreter.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import numpy as np
import structlog

from kvkeeper.common.service.threads import in_thread
from kvkeeper.common.service.turns import leave_place

from ..outputs.constraint import MAX_CHOICES, Constraint, UnknownTokenizer, Vocabulary, compile_grammar
from ..outputs.conversation import Chat
from ..outputs.model_text import NO_TOKENIZER, ModelText
from ..values.errors import InvalidField, TooComplex
from ..values.request import InputLimits, Int32Array
from .text_worker import TOKEN_DTYPE, Kind, Limits, SetUp
from .workers import JobRefused, JobTooMuch, Workers

log = structlog.get_logger()

BYTES_PER_TOKEN: Final = 32  # English has 4 to 5, the longest run of blanks in one token mostly 32
# 1 ms of the worst text that was tried, where the way to a worker and back takes 0.2 ms.
_SHORT_BYTES, _SHORT_TOKENS, _SHORT_CHAT = 2048, 512, 16
MAX_PIECES: Final = 4096
_CONSTRAINT_FLAG: Final = "--max-constraint-bytes"


class TextWork:
    """Tokenizing, detokenizing and constraints. `client` names the caller: workers take turns among clients. To be closed."""

    def __init__(
        self, text: ModelText, vocab_size: int, num_workers: int, limits: Limits, inputs: InputLimits, max_waiting: int
    ) -> None:
        """Builds what constraints need, which takes a second for a large vocabulary. Without it the model serves all the same.

        max_waiting: texts, chats and constraints of one client that may wait for a worker.
        """
        self._text = text
        self._limits, self._inputs = limits, inputs
        self._vocabulary: Vocabulary | None = None
        self._no_constraints = "the model has no tokenizer: its output cannot be constrained"
        self._workers: Workers | None = None
        self._short_chats: Workers | None = None
        if text.tokenizer is not None:
            try:
                self._vocabulary = Vocabulary.of(text.tokenizer, vocab_size)
            except UnknownTokenizer as error:
                self._no_constraints = f"the output of this model cannot be constrained, for its tokenizer: {error}"
                log.warning("no_constraints", reason=str(error))
            set_up = SetUp(text.tokenizer.state(), vocab_size, asdict(limits))
            self._workers = Workers(num_workers, set_up, max_waiting)
            self._short_chats = Workers(1, set_up, max_waiting)

    async def close(self) -> None:
        """End the processes; what is under way in them is refused, as is what comes later and needs them. Idempotent."""
        for workers in (self._workers, self._short_chats):
            if workers is not None:
                await workers.close()

    async def encode(self, client: str, text: str, field: str, max_tokens: int) -> list[int] | Int32Array:
        """Token ids of a text for at most max_tokens. Raises InvalidField, TooComplex, QueueFull."""
        raw = text.encode()
        self._check_bytes(len(raw), field, max_tokens)
        if self._workers is None or len(raw) <= _SHORT_BYTES:
            return self._text.encode(text, field)
        return _ids(await self._run(self._workers, client, Kind.ENCODE, raw, field))

    async def encode_chat(self, client: str, chat: Chat, max_tokens: int) -> list[int] | Int32Array:
        """Token ids of a conversation, by the model's chat template. Raises as encode does."""
        if self._workers is None or self._short_chats is None:
            raise InvalidField(NO_TOKENIZER, field="chat")
        num_bytes = sum(len(text.encode()) for text in chat.texts())
        self._check_bytes(num_bytes, "chat", max_tokens)
        is_short = num_bytes <= _SHORT_BYTES and len(chat.messages) <= _SHORT_CHAT
        workers = self._short_chats if is_short else self._workers
        kind = Kind.ENCODE_PLAIN_CHAT if chat.plain_user_text else Kind.ENCODE_CHAT
        return _ids(await self._run(workers, client, kind, json.dumps(asdict(chat)).encode(), "chat"))

    async def decode(self, client: str, token_ids: Int32Array, *, with_added: bool) -> str:
        """The text of token ids. with_added: also of the tokens that `encode` puts around a text."""
        if not with_added:
            token_ids = self._text.without_added(token_ids)
        if self._workers is None or len(token_ids) <= _SHORT_TOKENS:
            return self._text.decode(token_ids.tolist())
        body = token_ids.astype(TOKEN_DTYPE).tobytes()
        return (await self._run(self._workers, client, Kind.DECODE, body, "token_ids")).decode()

    def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """What each token stands for by itself, at most MAX_PIECES. For a tokenizer without constraints, as text."""
        if (vocabulary := self._vocabulary) is not None:
            return [vocabulary.tokens.decode_bytes([token_id]) for token_id in token_ids]
        return [self._text.decode([token_id]).encode() for token_id in token_ids]

    async def constraint(
        self, client: str, kind: str, source: str | Sequence[str], thought: tuple[str, str] | None = None
    ) -> Constraint:
        """kind: json_schema, regex or choices. thought: what is around one before the output, if there may be one.

        Raises InvalidField, TooComplex, QueueFull.
        """
        field = f"sampling.{kind}"
        if self._workers is None or self._vocabulary is None:
            raise InvalidField(self._no_constraints, field=field)
        if kind == "choices" and (not 1 <= len(source) <= MAX_CHOICES or not all(source)):
            raise InvalidField(f"choices: 1 to {MAX_CHOICES}, none empty", field=field, limit=MAX_CHOICES)
        limit = self._inputs.constraint_bytes
        if not 1 <= sum(len(part.encode()) for part in source) <= limit:
            raise InvalidField(f"{field}: 1 to {limit} bytes", field=field, limit=limit, flag=_CONSTRAINT_FLAG)
        job = json.dumps([kind, source if isinstance(source, str) else list(source), limit, *(thought or ())]).encode()
        grammar = (await self._run(self._workers, client, Kind.CONSTRAINT, job, field)).decode()
        return await in_thread(compile_grammar, self._vocabulary, grammar, field)

    async def _run(self, workers: Workers, client: str, kind: Kind, body: bytes, field: str) -> bytes:
        leave_place()  # what waits here is counted by the bytes that requests hold
        try:
            return await workers.run(client, kind, body)
        except JobRefused as error:
            flag = {"flag": _CONSTRAINT_FLAG} if "limit" in error.metadata else {}
            metadata = {"field": field, **error.metadata, **flag}
            raise InvalidField(f"{metadata['field']}: {error}", **metadata) from None
        except JobTooMuch as error:
            limit = {
                "time": {"limit": self._limits.cpu_s, "flag": "--text-seconds"},
                "memory": {"limit": self._limits.memory, "flag": "--text-memory"},
            }.get(error.metadata["exceeded"], {})
            raise TooComplex(f"{field}: {error}", field=field, **error.metadata, **limit) from None

    def max_text_bytes(self, max_tokens: int) -> int:
        """Most bytes of a text for at most so many tokens."""
        return min(self._inputs.text_bytes, BYTES_PER_TOKEN * max_tokens)

    def _check_bytes(self, num_bytes: int, field: str, max_tokens: int) -> None:
        limit = self.max_text_bytes(max_tokens)
        if num_bytes > limit:
            flag = {"flag": "--max-text-bytes"} if limit == self._inputs.text_bytes else {}  # else the model's length bounds it
            raise InvalidField(f"{field}: at most {limit} bytes, not {num_bytes}", field=field, limit=limit, **flag)


def _ids(body: bytes) -> Int32Array:
    return np.frombuffer(body, TOKEN_DTYPE).astype(np.int32)
