"""The fields of requests for a response (POST /v1/responses), as fields.py has those of chats, and the chat that is meant."""

from typing import Any, Literal

from pydantic import Field

from kvkeeper.http.errors import refused
from kvkeeper.http.fields import Fields, Refused


class ReplyTool(Fields):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedReplyTool(Fields):
    type: Literal["function"]
    name: str


class ReplyFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ReplyText(Fields):
    format: ReplyFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReplyReasoning(Fields):
    effort: str | None = None
    generate_summary: str | None = None
    summary: str | None = None


class ReplyRequest(Fields):
    """A conversation is sent whole: nothing is stored."""

    input: str | list[dict[str, Any]]
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    model: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReplyReasoning | None = None
    stream: bool | None = None
    temperature: float | None = None
    text: ReplyText | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedReplyTool | None = None
    tools: list[ReplyTool] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None


REPLIES_REFUSED = {
    "access_programs": Refused("not served"),
    "background": Refused("a response is waited for", harmless=False),
    "background_options": Refused("a response is waited for"),
    "context_management": Refused("conversations are taken whole"),
    "conversation": Refused("nothing is stored: send the conversation"),
    "image": Refused("the output is text"),
    "max_tool_calls": Refused("nothing is called here"),
    "moderation": Refused("nothing is moderated here"),
    "previous_response_id": Refused("nothing is stored: send the conversation"),
    "prompt": Refused("nothing is stored: send the conversation"),
    "truncation": Refused("conversations are taken whole", harmless="disabled"),
}
REPLIES_NO_EFFECT = {
    "metadata": "nothing is stored",
    "prompt_cache_key": "prefixes are found by their tokens",
    "prompt_cache_options": "prefixes are found by their tokens",
    "prompt_cache_retention": "the eviction policy decides",
    "safety_identifier": "the bearer token says who asks",
    "service_tier": "there is one",
    "store": "nothing is stored",
    "stream_options": "nothing is sent but the text",
    "user": "the bearer token says who asks",
}
REPLIES_NO_EFFECT_WITHIN = {
    "include[]: reasoning.encrypted_content": "thoughts come as they are",
    "reasoning.generate_summary": "thoughts come whole",
    "reasoning.summary": "thoughts come whole",
    "text.format.description": "a schema says it all",
    "text.format.name": "a schema says it all",
    "text.format.strict": "a schema always holds",
    "tools[].strict": "arguments fit the schema where a call is required",
}
_FIELDS = {  # of items, with those that have no effect behind the bar
    "message": ({"type", "role", "content"}, {"id", "status", "phase"}),
    "function_call": ({"type", "call_id", "name", "arguments"}, {"id", "status"}),
    "function_call_output": ({"type", "call_id", "output"}, {"id", "status"}),
    "reasoning": ({"type"}, {"id", "status", "summary", "content", "encrypted_content"}),
}
_PARTS = ("input_text", "output_text", "text")


def chat_fields(request: ReplyRequest) -> dict[str, Any]:
    """The fields of the chat that is meant. Raises HttpError."""
    turns = [{"role": "system", "content": request.instructions}] if request.instructions else []
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    for number, item in enumerate(items):
        _add(turns, item, f"input[{number}]")
    functions = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in request.tools or ()]
    choice = request.tool_choice
    named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedReplyTool) else choice
    form = request.text.format if request.text is not None else None
    schema = {"name": "answer", "schema": form.schema_} if form is not None and form.type == "json_schema" else None
    has_logprobs = "message.output_text.logprobs" in (request.include or ())
    return {
        "messages": turns,
        "max_tokens": request.max_output_tokens,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "response_format": None if form is None else {"type": form.type, "json_schema": schema},
        "temperature": request.temperature,
        "tool_choice": named,
        "tools": [{"type": "function", "function": function} for function in functions] or None,
        "logprobs": has_logprobs or None,
        "top_logprobs": request.top_logprobs,
        "top_p": request.top_p,
    }


def _add(turns: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    """The turn that an item is, or a part of. Calls belong to the turn of the assistant before them. Raises HttpError."""
    kind = item.get("type", "message")
    if kind not in _FIELDS:
        raise refused(f"{place}.type", f"{' or '.join(_FIELDS)}, not {kind!r}")
    needed, others = _FIELDS[kind]
    item = {name: value for name, value in item.items() if value is not None}  # clients send items back as they came
    for name in item.keys() - needed - others:
        raise refused(f"{place}.{name}", "there is no such field")
    for name in needed - item.keys() - {"type"}:
        raise refused(f"{place}.{name}", "it is missing")
    if kind == "message":
        turns.append({"role": item["role"], "content": _text(item["content"], f"{place}.content")})
    elif kind == "function_call_output":
        text = _text(item["output"], f"{place}.output")
        turns.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    elif kind == "function_call":
        if not turns or turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant", "content": None})
        function = {"name": item["name"], "arguments": item["arguments"]}
        turns[-1].setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(place, "a text or a list of parts")
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _PARTS or not isinstance(part.get("text"), str):
            raise refused(f"{place}[{number}]", "only parts with a text are taken")
    return "".join(part["text"] for part in content)
