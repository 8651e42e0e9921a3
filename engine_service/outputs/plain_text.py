"""PlainText: encodes chats so that what a user has written becomes text, whatever it spells, and never a control token.

A control token is an added token of the tokenizer, which elsewhere comes wherever its text stands. Here it has a secret name
instead. The text around what users have written gets the names before it is encoded, and what users have written keeps its
letters: the first and the last letter of each control token are replaced in it until then, so that no control token begins or
ends in it. All other text is encoded as ever.
"""

import json
import re
import secrets
from collections.abc import Callable

import tokenizers

from ..model.checkpoint.errors import TokenizerError
from .conversation import Chat, WrongChat

_FIRST_FREE, _LAST_FREE = 0xF0000, 0xFFFFD  # private characters, one of which replaces a letter


class PlainText:
    """A tokenizer with secret names. Its attributes do not change."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        parsed = json.loads(backend.to_str())
        secret, controls = secrets.token_hex(8), [token for token in parsed["added_tokens"] if _is_control(token)]
        self._names = {token["content"]: f"\ue000{secret}.{at}\ue001" for at, token in enumerate(controls)}
        ids = {token["content"]: token["id"] for token in parsed["added_tokens"]}
        for token in controls:
            token |= {"content": self._names[token["content"]], "normalized": False}
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(parsed))
        # Under another name a token may have another id.
        self._ids = {self._backend.token_to_id(self._names.get(content, content)): own_id for content, own_id in ids.items()}
        unknown = ids.get(parsed["model"].get("unk_token"), parsed["model"].get("unk_id"))
        self._forbidden = {ids[content] for content in self._names} - {unknown}
        is_exact = not any(token["special"] and token["single_word"] for token in parsed["added_tokens"])
        self._is_able = is_exact and self._ids.keys().isdisjoint(self._backend.get_vocab(with_added_tokens=False).values())
        self._edges = {letter for content in self._names for letter in (content.strip()[0], content.strip()[-1])}
        self._lens = sorted({len(content) for content in self._names}, reverse=True)
        firsts = {content[0] for content in self._names}
        self._first = re.compile(f"[{re.escape(''.join(sorted(firsts)))}]" if firsts else r"(?!)")

    def encode_chat(self, chat: Chat, template: Callable[..., str]) -> list[int]:
        """Token ids. Raises WrongChat, and what the template raises."""
        used = {ord(letter) for text in chat.texts() for letter in text if ord(letter) >= _FIRST_FREE}
        free = (place for place in range(_FIRST_FREE, _LAST_FREE + 1) if place not in used)
        replaced = {ord(letter): place for letter, place in zip(self._edges, free, strict=False)}
        if not self._is_able or len(replaced) < len(self._edges):
            raise WrongChat("plain_user_text", "does not work with the model's tokenizer")
        text = chat.render(template, lambda own: own.translate(replaced))
        named = self._with_names(text).translate({place: letter for letter, place in replaced.items()})
        try:
            ids = self._backend.encode(named, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise TokenizerError("the text is not valid Unicode") from error
        if any(token_id in self._forbidden and token_id not in self._ids for token_id in ids):
            raise WrongChat("plain_user_text", "the model's tokenizer spells a control token out of what a user has written")
        return [self._ids.get(token_id, token_id) for token_id in ids]

    def _with_names(self, text: str) -> str:
        """The text with the name of each control token in its place, the longest where several begin."""
        pieces, end = [], 0
        for found in self._first.finditer(text):
            start = found.start()
            written = (text[start : start + length] for length in self._lens)
            content = None if start < end else next((each for each in written if each in self._names), None)
            if content is not None:
                pieces += [text[end:start], self._names[content]]
                end = start + len(content)
        return "".join([*pieces, text[end:]])


def _is_control(token: dict[str, object]) -> bool:
    """Blanks control nothing, and a token of a whole word has to stay one."""
    return bool(str(token["content"]).strip()) and not token["single_word"]
