"""The fields of Anthropic's requests, as fields.py has OpenAI's, and the chat that such a request stands for."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from kvkeeper.http.errors import refused
from kvkeeper.http.fields import Fields, Refused


class MessageParam(Fields):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ToolParam(Fields):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    strict: bool | None = None


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Fields):
    """What becomes the prompt."""

    model: str
    messages: list[MessageParam]
    output_config: OutputConfig | None = None
    system: str | list[dict[str, Any]] | None = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    tools: list[ToolParam] | None = None


class MessageRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


MESSAGES_REFUSED = {
    "container": Refused("nothing is run here"),
    "diagnostics": Refused("not served"),
    "inference_geo": Refused("it runs where it runs"),
    "mcp_servers": Refused("nothing else is asked"),
    "speed": Refused("there is one", harmless="standard"),
}
MESSAGES_NO_EFFECT = {
    "cache_control": "prefixes are found by their tokens",
    "metadata": "nothing is stored",
    "service_tier": "there is one",
    "user_profile_id": "the key says who asks",
    "workspace_id": "the key says who asks",
}
MESSAGES_NO_EFFECT_WITHIN = {
    "messages[].content[].cache_control": "prefixes are found by their tokens",
    "messages[].content[].caller": "the model called",
    "messages[].content[].is_error": "the text of a result says it",
    "messages[].content[].signature": "thoughts of earlier turns are left out",
    "messages[].content[].thinking": "thoughts of earlier turns are left out",
    "thinking.budget_tokens": "a thought is as long as max_tokens allows",
    "tools[].cache_control": "prefixes are found by their tokens",
    "tools[].eager_input_streaming": "arguments come as they are written",
    "tools[].strict": "arguments fit the schema where a call is required",
}
_FIELDS_OF_BLOCKS = {
    "text": {"text"},
    "tool_use": {"id", "name", "input", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
}
_BLOCKS = {
    "system": {"text"},
    "user": {"text", "tool_result"},
    "assistant": {"text", "tool_use", "thinking", "redacted_thinking"},
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_fields(request: CountRequest) -> dict[str, Any]:
    """The fields of a request for the tokens of the same chat, as fields.py has it. Raises HttpError."""
    system = [] if request.system is None else _turns("system", request.system, "system")
    turns = [turn for i, each in enumerate(request.messages) for turn in _turns(each.role, each.content, f"messages[{i}]")]
    functions = [(tool.name, tool.description, tool.input_schema) for tool in request.tools or ()]
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema} | ({"description": text} if text else {})}
        for name, text, schema in functions
    ]
    thinking = (
        {} if request.thinking is None else {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}}
    )
    found: dict[str, Any] = {
        "messages": [*system, *turns],
        "chat_template_kwargs": thinking.get(request.thinking.type, {}) if request.thinking is not None else {},
        "continue_final_message": bool(turns) and turns[-1]["role"] == "assistant" and "tool_calls" not in turns[-1],
    }
    return found | ({"tools": tools} if tools else {})


def answer_fields(request: MessageRequest) -> dict[str, Any]:
    """The fields of the same chat as OpenAI has it. Raises HttpError."""
    found = chat_fields(request)
    for name in ("max_tokens", "temperature", "top_k", "top_p"):
        found[name] = getattr(request, name)
    found["stop"] = request.stop_sequences
    found["return_token_ids"] = True  # the first event has their number
    if (choice := request.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        found["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if (config := request.output_config) is not None:
        found["reasoning_effort"] = config.effort
        if config.format is not None:
            found["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": config.format.schema_},
            }
    return found


def _turns(role: str, content: str | list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """What one message says: results of tools are turns of their own, before its text."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, block in enumerate(content):
        where = f"{place}[{number}]" if role == "system" and place == "system" else f"{place}.content[{number}]"
        kind = _check_block(block, role, where)
        try:
            if kind == "text":
                texts.append(block["text"])
            elif kind == "tool_use":
                function = {"name": block["name"], "arguments": json.dumps(block["input"])}
                calls.append({"id": block["id"], "type": "function", "function": function})
            elif kind == "tool_result":
                text = _turns("system", block.get("content") or "", where)[0]["content"]
                results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        except KeyError as error:
            raise refused(f"{where}.{error.args[0]}", "it is missing") from None
    said: dict[str, Any] = {"role": role, "content": "".join(texts) if texts or not calls else None}
    if calls:
        said["tool_calls"] = calls
    return [*results, said] if texts or calls or not results else results


def _check_block(block: Mapping[str, Any], role: str, where: str) -> str:
    kind = str(block.get("type"))
    if kind not in _BLOCKS[role]:
        raise refused(f"{where}.type", f"{kind} is not served here; of the role {role}, {', '.join(sorted(_BLOCKS[role]))} are")
    for name, value in block.items():
        if value is not None and name not in {"type", "cache_control", *_FIELDS_OF_BLOCKS[kind]}:
            raise refused(f"{where}.{name}", "not served")
    return kind
