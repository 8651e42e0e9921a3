"""The fields of requests: which take effect, which are refused by name, and which are listed as having no effect here.

A field that is in none of the three is refused, too: none is ignored in silence. docs/operate/http.md has the table. A field of
None counts as absent. The engine knows the ranges.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvkeeper.http.errors import HttpError, refused

Request = TypeVar("Request", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a field is not served. harmless: the value that asks for nothing."""

    why: str
    harmless: Any = None


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's


class StructuredOutputs(Fields):
    """As vLLM has it."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


class JsonSchema(Fields):
    name: str
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Generating(Fields):
    """What requests for text have in common."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = Field(None, ge=0)
    n: int | None = None
    presence_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    response_format: ResponseFormat | None = None
    # vLLM's
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    cache_salt: str | None = None
    early_stopping: bool | None = None
    guided_choice: list[str] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    ignore_eos: bool | None = None
    length_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    priority: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    top_k: int | None = None
    typical_p: float | None = None
    use_beam_search: bool | None = None

    @property
    def counts_on(self) -> bool:
        """Whether each event of a stream counts the tokens up to it."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(Generating):
    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class Function(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"]
    function: FunctionName


class Conversation(Fields):
    """What becomes the prompt of a chat."""

    model: str | None = None
    messages: list[dict[str, Any]]
    tools: list[Tool] | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None


class ChatRequest(Generating, Conversation):
    logprobs: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    top_logprobs: int | None = None


class TextToTokenize(Fields):
    model: str | None = None
    prompt: str
    return_token_strs: bool | None = None


class ChatToTokenize(Conversation):
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: list[int]


_SWITCHES = {
    "include_stop_str_in_output": "a text ends before its stop string",
    "return_tokens_as_token_ids": "return_token_ids has them",
}
_NOT_SERVED = {name: Refused(why, harmless=False) for name, why in _SWITCHES.items()} | {
    "guided_decoding_backend": Refused("there is one"),
    "guided_grammar": Refused("grammars are not served; a JSON schema, a regular expression and choices are"),
    "guided_whitespace_pattern": Refused("JSON comes without white space to choose"),
    "kv_transfer_params": Refused("engines hand K and V over by themselves"),
    "logits_processors": Refused("not served"),
    "truncate_prompt_tokens": Refused("prompts are taken whole"),
    "vllm_xargs": Refused("not served"),
}
_OF_TEXT = {"add_special_tokens": Refused("tokens around a text are the tokenizer's", harmless=True)}
_OF_CHAT = {
    "add_special_tokens": Refused("its tokens are the template's", harmless=False),
    "chat_template": Refused("the model's own is used"),
    "mm_processor_kwargs": Refused("prompts are text"),
}
_ALWAYS_SO = {
    "spaces_between_special_tokens": "the tokenizer knows where blanks are",
    "user": "the bearer token says who asks",
}

REFUSED: Mapping[type[BaseModel], Mapping[str, Refused]] = {
    CompletionRequest: _NOT_SERVED | _OF_TEXT | {"suffix": Refused("a text is continued, and not filled in", harmless="")},
    ChatRequest: _NOT_SERVED
    | _OF_CHAT
    | {
        "audio": Refused("the output is text"),
        "echo": Refused("for completions alone", harmless=False),
        "function_call": Refused("deprecated; tool_choice has taken its place", harmless="auto"),
        "functions": Refused("deprecated; tools have taken its place"),
        "modalities": Refused("the output is text", harmless=["text"]),
        "moderation": Refused("nothing is moderated here"),
        "prediction": Refused("speculation is the engine's own"),
        "verbosity": Refused("no model here knows it; chat_template_kwargs reach the template", harmless="medium"),
        "web_search_options": Refused("nothing is searched for"),
    },
    TextToTokenize: _OF_TEXT,
    ChatToTokenize: _OF_CHAT,
    DetokenizeRequest: {},
}
NO_EFFECT: Mapping[type[BaseModel], Mapping[str, str]] = {
    CompletionRequest: _ALWAYS_SO,
    ChatRequest: _ALWAYS_SO
    | {
        "include_reasoning": "what a model thought comes as reasoning_content",
        "metadata": "nothing is stored",
        "prompt_cache_key": "prefixes are found by their tokens",
        "prompt_cache_options": "prefixes are found by their tokens",
        "prompt_cache_retention": "the eviction policy decides",
        "safety_identifier": "the bearer token says who asks",
        "service_tier": "there is one; priority orders requests",
        "store": "nothing is stored",
    },
    TextToTokenize: {},
    ChatToTokenize: {},
    DetokenizeRequest: {},
}
NO_EFFECT_OF_MESSAGES = {  # clients send answers back as they came
    "annotations": "links of an answer",
    "reasoning_content": "a thought of an earlier turn",
}
NO_EFFECT_WITHIN = {
    "response_format.json_schema.description": "a schema says it all",
    "response_format.json_schema.name": "a schema says it all",
    "response_format.json_schema.strict": "a schema always holds",
    "stream_options.include_obfuscation": "nothing is sent but the text",
    "tools[].function.strict": "arguments fit the schema where a call is required",
}


def read(
    kind: type[Request],
    body: bytes,
    not_served: Mapping[str, Refused] | None = None,
    without_effect: Mapping[str, str] | None = None,
) -> Request:
    """The request in a body. Raises HttpError, which names a field that is wrong or not served."""
    given = read_json(body)
    not_served = REFUSED[kind] if not_served is None else not_served
    without_effect = NO_EFFECT[kind] if without_effect is None else without_effect
    kept = {}
    for name, value in given.items():
        if value is None or name in without_effect:
            continue
        if (no := not_served.get(name)) is not None:
            if value != no.harmless:
                raise refused(name, f"not served: {no.why}")
            continue
        kept[name] = value
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        raise _first(error) from None


def read_json(body: bytes) -> dict[str, Any]:
    """The object in a body. Raises HttpError."""
    try:
        given = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise HttpError(400, "the body is no JSON object")
    return given


def _first(error: ValidationError) -> HttpError:
    """What is wrong first, with its field as a path: stop[2], response_format.json_schema.name."""
    found = error.errors(include_url=False, include_context=False)[0]
    if found["type"] == "extra_forbidden":
        path = _path(found["loc"])
        return HttpError(400, f"{path}: there is no such field", path, "unknown_parameter")
    # Of a union each member has its say, behind the field's own name.
    path = _path([part for part in found["loc"] if isinstance(part, int) or part.isidentifier()])
    return HttpError(400, f"{path}: {found['msg']}", path)


def _path(parts: Any) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
