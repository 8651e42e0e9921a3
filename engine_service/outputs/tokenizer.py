"""Tokenizer: text to token ids and back, for one model folder; stop strings; the chat template.

A thin shell on the tokenizers library. Detokenizer turns a stream of tokens into pieces of text. Every piece is valid UTF-8,
and the cost of a token does not grow with the output. StopStrings finds stop strings across the edges of pieces. Each output
has its own Detokenizer and StopStrings; the Tokenizer is shared and never changes.
"""

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tokenizers

from ..model.checkpoint.errors import TokenizerError
from .tokenizer_folder import find_template, read_tokenizer

if TYPE_CHECKING:
    from .chat_template import ChatTemplate
    from .conversation import Chat
    from .plain_text import PlainText

_REPLACEMENT: Final = "\ufffd"  # decoders put it for bytes that are not, or not yet, a character
_MOST_PENDING: Final = 8  # tokens without a whole character; a UTF-8 character ends within 4 bytes, so more are junk
_LONGEST_PARTIAL: Final = 3  # bytes of an incomplete character, so at most as many tokens


class Tokenizer:
    """The tokenizer of a model folder. Its attributes do not change.

    Attributes:
        eos_ids: ids that end a sequence, from the first of generation_config.json, config.json and tokenizer_config.json that
            has them, as in transformers.
        vocab_size: every id is below it.
        added_ids: of the tokens that were added to what the tokenizer learned, special ones among them.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], eos_ids: frozenset[int]) -> None:
        """settings: chat_template, response_template and special_tokens, as FolderTokenizer has them."""
        self._backend = backend
        self._settings = settings
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self._skipped = frozenset(i for i, token in added.items() if token.special)
        self._templates: dict[bool, ChatTemplate] = {}  # by whether there are tools
        self.eos_ids = eos_ids
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json and the files beside it. Raises as read_tokenizer does."""
        found = read_tokenizer(Path(folder))
        names = ("chat_template", "response_template", "special_tokens")
        return cls(found.backend, {name: getattr(found, name) for name in names}, found.eos_ids)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Tokenizer":
        """The same tokenizer in another process."""
        return cls(tokenizers.Tokenizer.from_str(state["backend"]), state["settings"], frozenset(state["eos_ids"]))

    def state(self) -> dict[str, Any]:
        """What from_state takes; can be written as JSON."""
        return {"backend": self.to_json(), "settings": dict(self._settings), "eos_ids": sorted(self.eos_ids)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special_tokens: add the tokens that the model wants around a text, such as a begin token. The output of
                apply_chat_template has them already.

        Raises:
            TokenizerError: the text is not valid Unicode.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise TokenizerError("the text is not valid Unicode") from error
        return ids

    def encode_chat(self, chat: "Chat") -> list[int]:
        """Token ids of a conversation, by the model's own template. Raises TokenizerError, WrongChat."""
        if chat.plain_user_text:
            return self.plain_text.encode_chat(chat, self.apply_chat_template)
        return self.encode(chat.render(self.apply_chat_template), add_special_tokens=False)

    @property
    def chat_template(self) -> str:
        """The template, of several the one for tools. Empty: the model has none."""
        try:
            return find_template(self._settings.get("chat_template"), "tool_use")
        except TokenizerError:
            return ""

    @property
    def response_template(self) -> str:
        """As JSON. Empty: the model has none."""
        found = self._settings.get("response_template")
        return "" if found is None else json.dumps(found)

    @cached_property
    def plain_text(self) -> "PlainText":
        """The same tokenizer, for which what a user has written is text alone."""
        from .plain_text import PlainText  # most engines need none

        return PlainText(self._backend)

    def without_added(self, token_ids: Sequence[int]) -> Sequence[int]:
        """`token_ids` without the tokens that `encode` adds around a text, where they are present."""
        before, after = self._added
        ids = list(token_ids)
        start = len(before) if ids[: len(before)] == before else 0
        end = len(ids) - len(after) if after and ids[max(start, len(ids) - len(after)) :] == after else len(ids)
        return ids[start:end]

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """The tokens that `encode` adds before a text, and those that it adds behind it."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        start = next(at for at in range(len(whole) + 1) if whole[at : at + len(plain)] == plain)
        return whole[:start], whole[start + len(plain) :]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; an id outside the vocabulary has no text."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def to_json(self) -> str:
        """The whole tokenizer, in the form of tokenizer.json."""
        return str(self._backend.to_str())

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether the token can stand for text at all."""
        if skip_special_tokens and token_id in self._skipped:
            return False
        return self._backend.id_to_token(token_id) is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render messages ({"role": ..., "content": ...}) with the model's own template, in a sandbox but without limits.

        Raises:
            TokenizerError: the model has no template, or the template refuses the messages or fails.
            MemoryError, RecursionError: the template takes too much.
        """
        from .chat_template import ChatTemplate  # jinja2 takes as long to load as all of tokenizers; most texts need none

        with_tools = variables.get("tools") is not None
        if with_tools not in self._templates:
            self._templates[with_tools] = ChatTemplate(self._settings.get("chat_template"), with_tools=with_tools)
        known = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return self._templates[with_tools].render({**known, **self._settings.get("special_tokens", {}), **variables})


class Detokenizer:
    """The text of one output, piece by piece, as its tokens arrive.

    A piece is held back while it ends in bytes that the next token may complete to a character. New tokens are decoded together
    with a few earlier ones, because a decoder treats the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        """
        Args:
            prompt_ids: the tokens before the output; only the last few matter.
        """
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        end = [i for i in prompt_ids[-2 * _MOST_PENDING :] if self._has_text(i)]
        # Both ends of the context lie between characters. Bytes that begin the output's first character are pending.
        self._context, self._pending = self._split(end[-_MOST_PENDING - _LONGEST_PARTIAL :])
        self._context_len = len(self._decode(self._context))

    def add_token(self, token_id: int) -> str:
        """Add one token. Returns the text that is complete now; it may be empty."""
        if not self._has_text(token_id):
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if not text.endswith(_REPLACEMENT) and len(text) > self._context_len:
            return self._emit(text, self._pending, [])
        if len(self._pending) > _MOST_PENDING:  # junk: emit it, but for bytes that may still become a character
            junk, rest = self._pending[:-_LONGEST_PARTIAL], self._pending[-_LONGEST_PARTIAL:]
            return self._emit(self._decode(self._context + junk), [], rest)
        return ""

    def flush(self) -> str:
        """The output ends. Returns the text held back; an incomplete character becomes U+FFFD."""
        if not self._pending:
            return ""
        return self._emit(self._decode(self._context + self._pending), self._pending, [])

    def copy(self) -> "Detokenizer":
        """A copy, for an output that continues with other tokens."""
        other = copy.copy(self)
        other._pending = self._pending.copy()  # the only list that add_token changes in place
        return other

    def _emit(self, text: str, context: list[int], pending: list[int]) -> str:
        piece = text[self._context_len :]
        self._context, self._pending = context, pending
        self._context_len = len(self._decode(context))
        return piece

    def _split(self, end: list[int]) -> tuple[list[int], list[int]]:
        """The end of a prompt, cut to whole characters on both sides, and the tokens of the incomplete character behind it."""
        for num_after, num_before in itertools.product(range(_LONGEST_PARTIAL + 1), repeat=2):
            context, partial = end[num_before : len(end) - num_after], end[len(end) - num_after :]
            text = self._decode(context)
            whole = not text.startswith(_REPLACEMENT) and not text.endswith(_REPLACEMENT)
            if whole and (context or not num_before):
                return context, partial
        return [], []

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.has_text(token_id, skip_special_tokens=self._skip)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`text` may be emitted; `stop` is the stop string found behind it, or None."""

    text: str
    stop: str | None


class StopStrings:
    """Finds stop strings in the text of one output, piece by piece.

    The stop string that is complete first wins, and the longest of several that are complete at the same place; so the answer
    does not depend on where the pieces are cut. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere; it is refused at submit"
        self._stops = tuple(stops)
        self._held = ""

    def add_piece(self, piece: str) -> StopMatch:
        """Add a piece of text. Not to be called again after a match."""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return StopMatch(text[:start], stop)
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return StopMatch(text[: len(text) - held], None)

    def flush(self) -> str:
        """The output ends. Returns the text held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
