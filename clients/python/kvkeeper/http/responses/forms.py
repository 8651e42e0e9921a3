"""The forms in which families of models write thoughts and calls of tools, as data, and the choice of one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .reader import Reader

Tool = Mapping[str, Any]  # as OpenAI's chats have it: {"type": "function", "function": {"name": ..., "parameters": ...}}
Constraint = Mapping[str, Any]  # one field of the protocol's SamplingParams.constraint, by name


class UnknownForm(ValueError):
    """No form has this name. The text lists those that there are."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a family writes thoughts and calls.

    keeps_special_tokens: whether the text has to come with its special tokens (SamplingParams.keep_special_tokens).
    """

    name: str
    keeps_special_tokens: bool = False

    def reader(
        self, tools: Sequence[Tool], *, template_arguments: Mapping[str, Any] | None = None, is_forced: bool = False
    ) -> Reader:
        """Of one continuation. template_arguments: of its chat. is_forced: the answer has the form that `forced` asked for."""
        return Reader()

    def forced(self, tools: Sequence[Tool], choice: str | None) -> Constraint:
        """An answer that calls tools. choice: the name of the one tool to call; None: one or more of any."""
        return {"json_schema": "{}"}

    def answer(self, constraint: Constraint, *, template_arguments: Mapping[str, Any] | None = None) -> Constraint:
        """The constraint for the answer alone: what the model thinks before it stays free."""
        return constraint


FORMS = {form.name: form for form in (Form("plain"),)}


def choose_form(chat_template: str | None, named: str | None) -> Form:
    """The form of this name; else the one that the chat template shows. Raises UnknownForm."""
    if named is not None:
        if named not in FORMS:
            raise UnknownForm(f"{named!r} is none of {', '.join(sorted(FORMS))}")
        return FORMS[named]
    return FORMS["plain"]
