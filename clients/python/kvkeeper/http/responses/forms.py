"""The forms in which families of models write thoughts and calls of tools, as data, and the choice of one for a model."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .calls import CallSyntax
from .pieces import Reader
from .reader import FormReader

if TYPE_CHECKING:
    from .templates import ResponseTemplate

Tool = Mapping[str, Any]  # as OpenAI's chats have it: {"type": "function", "function": {"name": ..., "parameters": ...}}
Constraint = Mapping[str, Any]  # fields of the protocol's SamplingParams


class UnknownForm(ValueError):
    """No form has this name. The text lists those that there are."""


class WrongTemplate(ValueError):
    """It is no response template that can be used here. The text says why."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a family writes thoughts and calls.

    shown_by: what a chat template has in it if its model writes so; one of them is enough.
    thought: what is around a thought.
    calls: for one that has several ways, in the order in which they are tried.
    dropped: markers that say nothing themselves, such as those that end a turn where they are not the model's last token.
    id_chars: letters and digits of a call's id, where the template takes no others.
    is_thought_free: whether a thought stays free where the answer is constrained. Not where more markers are behind it.
    template: a response template, which reads answers that are not forced.
    """

    name: str
    shown_by: tuple[str, ...] = ()
    thought: tuple[str, str] | None = None
    calls: tuple[CallSyntax, ...] = ()
    dropped: tuple[str, ...] = ()
    id_chars: int | None = None
    is_thought_free: bool = True
    template: "ResponseTemplate | None" = None

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text has to come with special tokens, such as some markers are."""
        return bool(self.thought or self.calls or self.template)

    def reader(self, tools: Sequence[Tool], prompt_end: str = "", *, is_forced: bool = False) -> Reader:
        """A reader of one continuation.

        Args:
            prompt_end: what the chat template writes last, which may begin a thought; for a response template, the prompt.
            is_forced: the answer is what `forced` asked for.
        """
        if self.template is not None and not is_forced:
            from .templates import TemplateReader  # transformers takes a second to load

            return TemplateReader(self.template, tools, prompt_end)
        calls = (CallSyntax(""),) if is_forced else self.calls if tools else ()
        is_thinking = self.thought is not None and prompt_end.rstrip().endswith(self.thought[0])
        parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        return FormReader(self.thought, calls, self.dropped, parameters, is_thinking=is_thinking, id_chars=self.id_chars)

    def forced(self, tools: Sequence[Tool], choice: str | None) -> Constraint:
        """An answer of calls alone. choice: the one tool that is called; None: one call or more, of any of them.

        It is a JSON list without markers, whatever the family's form, for a reader with is_forced.
        """
        functions = [tool["function"] for tool in tools if choice in (None, tool["function"]["name"])]
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/{number}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for number, function in enumerate(functions)
        ]
        arguments = {
            str(number): _moved(function.get("parameters") or {"type": "object"}, f"#/$defs/{number}")
            for number, function in enumerate(functions)
        }
        most = {} if choice is None else {"maxItems": 1}
        schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": arguments}
        return {"json_schema": json.dumps(schema)}

    def answer(self, constraint: Constraint, prompt_end: str = "") -> Constraint:
        """The constraint for an answer alone: the thought before it stays free."""
        prompt_end = prompt_end.rstrip()
        if self.thought is None or not self.is_thought_free or prompt_end.endswith(self.thought[1]):
            return constraint
        opens, closes = self.thought
        return {**constraint, "thought": {"opens": "" if prompt_end.endswith(opens) else opens, "closes": closes}}


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at this place of another one, which its own references follow."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


_THINK = ("<think>", "</think>")
_NAME = r"(?P<name>[\w.-]+)"
_HARMONY = re.compile(
    rf"(?:functions\.)?{_NAME}(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>\s*(?=\{{)"
)
_CODER = re.compile(r"\s*<function=(?P<name>[^>\s]+)>")
_DEEPSEEK = tuple(
    f"<\uff5ctool\u2581{what}\uff5c>"
    for what in ("call\u2581begin", "call\u2581end", "calls\u2581begin", "calls\u2581end", "sep")
)

FORMS = (
    Form(
        "harmony",
        ("<|channel|>",),
        ("<|channel|>analysis<|message|>", "<|end|>"),
        tuple(
            CallSyntax(opens, "<|call|>", _HARMONY)
            for opens in ("<|channel|>commentary to=", "<|start|>assistant to=", "to=functions.")
        ),
        (
            *("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
            *("<|end|>", "<|return|>", "<|call|>"),
        ),
        is_thought_free=False,
    ),
    Form(
        "gemma4",
        ("<|tool_call>",),
        ("<|channel>thought", "<channel|>"),
        (CallSyntax("<|tool_call>", "<tool_call|>", re.compile(rf"\s*call:{_NAME}(?=\{{)"), "loose", '<|"|>'),),
        ("<turn|>", "<|tool_response>", "<eos>"),
    ),
    Form(
        "function-gemma",
        ("<start_function_call>",),
        calls=(
            CallSyntax(
                *("<start_function_call>", "<end_function_call>"), re.compile(rf"\s*call:{_NAME}(?=\{{)"), "loose", "<escape>"
            ),
        ),
    ),
    Form(
        "deepseek",
        _DEEPSEEK[2:3],
        _THINK,
        (
            CallSyntax(_DEEPSEEK[0], f"```{_DEEPSEEK[1]}", re.compile(rf"\s*function{_DEEPSEEK[4]}{_NAME}\n```json\n(?=\{{)")),
            CallSyntax(_DEEPSEEK[0], _DEEPSEEK[1], re.compile(rf"\s*{_NAME}{_DEEPSEEK[4]}\s*(?=\{{)")),
        ),
        _DEEPSEEK[2:4],
    ),
    Form(
        "mistral",
        ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
        ("[THINK]", "[/THINK]"),
        (
            CallSyntax("[TOOL_CALLS]"),
            CallSyntax("[TOOL_CALLS]", header=re.compile(rf"\s*{_NAME}(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{{)")),
        ),
        id_chars=9,
    ),
    Form(
        "qwen",
        ("<tool_call>",),
        _THINK,
        (
            CallSyntax("<tool_call>", "</tool_call>"),
            CallSyntax("<tool_call>", "</tool_call>", _CODER, "parameters"),
        ),
        ("<|im_end|>", "<|endoftext|>"),
    ),
    Form(
        "llama3",
        ("<|python_tag|>", '{"name": function name, "parameters"'),
        calls=(CallSyntax("<|python_tag|>"), CallSyntax("")),
        dropped=("<|eot_id|>", "<|eom_id|>"),
    ),
    Form("think", ("<think>", "</think>"), _THINK),
    Form("plain"),
)


def choose_form(chat_template: str | None, named: str | None) -> Form:
    """The form of this name; else the first that the model's chat template shows. Raises UnknownForm."""
    forms = {form.name: form for form in FORMS}
    if named is not None and named not in forms:
        raise UnknownForm(f"{named!r} is none of {', '.join(forms)}")
    shown = (form.name for form in FORMS if any(text in (chat_template or "") for text in form.shown_by))
    return forms[named or next(shown, "plain")]


def template_form(text: str) -> Form:
    """The form that a response template, in JSON, describes. Raises WrongTemplate."""
    try:
        from . import templates
    except ImportError:
        raise WrongTemplate("transformers, which reads it, is not installed: pip install 'transformers>=5.23,<6'") from None
    try:
        template = templates.load(text)
    except ValueError as error:
        raise WrongTemplate(f"no response template: {error}") from None
    thought, dropped = templates.thought(template), templates.end_markers(template)
    return Form("template", thought=thought, dropped=dropped, template=template)
