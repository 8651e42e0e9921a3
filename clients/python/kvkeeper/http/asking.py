"""From the fields of a request to what the engine is asked: prompts, options, and whether the prompt's tokens are needed first.

They are where the answer has them (echo, return_token_ids), and where no max_tokens is given: as many as fit then.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvkeeper.client import AsyncGeneration, BeamSearch, Chat, GenerateOptions, KvkeeperError, Sampling, Thought
from kvkeeper.http.engines import Engine
from kvkeeper.http.errors import HttpError, of_engine, refused, too_long
from kvkeeper.http.fields import NO_EFFECT_OF_MESSAGES, Conversation, Generating

Prompt = str | Sequence[int] | Chat
Constraint = Mapping[str, Any]  # one field of Sampling by its name, or none
_OTHERWISE = {"max_tokens", "stop", "logit_bias", "seed", "top_k"}
_AS_THEY_ARE = (Sampling.__dataclass_fields__.keys() & Generating.model_fields.keys()) - _OTHERWISE
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt as the engine is asked to continue it.

    ids: its tokens, where they are known; where: the field that it came in; form: that of the output's form.
    """

    prompt: Prompt
    ids: tuple[int, ...] | None
    options: GenerateOptions
    where: str
    form: str

    def start(self, engine: Engine) -> AsyncGeneration:
        """Raises HttpError."""
        try:
            return engine.client.generate(self.prompt, self.options)
        except (TypeError, ValueError) as error:
            raise _wrong(error, self.where) from None

    def failure(self, error: KvkeeperError) -> HttpError:
        return of_engine(error, self.where, self.options.sampling.max_tokens or 1, self.form)


async def ask(
    engine: Engine, prompt: Prompt, options: GenerateOptions, where: str, form: str, *, shows_ids: bool
) -> EngineRequest:
    """shows_ids: the answer has the prompt's tokens. Raises HttpError."""
    ids = None if isinstance(prompt, str | Chat) else tuple(prompt)
    if ids is None and (shows_ids or options.sampling.max_tokens is None):
        prompt = ids = await get_tokens(engine, prompt, where)
    if options.sampling.max_tokens is None and ids is not None:
        limit = engine.model.max_tokens_per_sequence
        if len(ids) >= limit:
            raise too_long(limit, len(ids), 1, where)
        options = replace(options, sampling=replace(options.sampling, max_tokens=limit - len(ids)))
    return EngineRequest(prompt, ids, options, where, form)


async def get_tokens(engine: Engine, prompt: Prompt, where: str) -> tuple[int, ...]:
    """Raises HttpError."""
    try:
        return await engine.client.tokenize(prompt) if isinstance(prompt, str | Chat) else tuple(prompt)
    except KvkeeperError as error:
        raise of_engine(error, where) from None
    except (TypeError, ValueError) as error:
        raise _wrong(error, where) from None


def _wrong(error: Exception, where: str) -> HttpError:
    """A prompt or a number that no request can hold. The client's text names the place within messages."""
    text = str(error)
    path = text.partition(":")[0]
    return HttpError(400, text, path) if path.startswith(where) else refused(where, text)


def make_options(
    request: Generating,
    request_id: str,
    constraint: Constraint,
    max_tokens: int | None,
    num_logprobs: int | None,
    keeps_special_tokens: bool,
    best_of: int | None = None,
) -> GenerateOptions:
    """max_tokens: of 0, one token is drawn and dropped. Raises HttpError."""
    n = request.n or 1
    if not request.use_beam_search and (request.early_stopping is not None or request.length_penalty is not None):
        raise refused("length_penalty" if request.early_stopping is None else "early_stopping", "of a beam search alone")
    return GenerateOptions(
        request_id=request_id,
        n=n,
        cache_salt=request.cache_salt or "",
        priority=-(request.priority or 0),  # vLLM's lower numbers come first
        beam_search=BeamSearch(n, request.length_penalty, bool(request.early_stopping)) if request.use_beam_search else None,
        sampling=Sampling(
            **{name: value for name in _AS_THEY_ARE if (value := getattr(request, name)) is not None},
            **_with_thought(constraint),
            keep_special_tokens=keeps_special_tokens or request.skip_special_tokens is False,
            max_tokens=None if max_tokens is None else max(1, max_tokens),
            top_k=None if request.top_k is None else max(0, request.top_k),  # -1 is off in vLLM
            seed=None if request.seed is None else request.seed - (request.seed >= 2**63) * 2**64,
            stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
            logit_bias=_bias(request.logit_bias or {}),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=request.prompt_logprobs,
        ),
        best_of=best_of,
    )


def _with_thought(constraint: Constraint) -> Constraint:
    thought = constraint.get("thought")
    return constraint if thought is None else {**constraint, "thought": Thought(**thought)}


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise refused("logit_bias", "its names are token ids") from None


def find_constraint(request: Generating) -> tuple[Constraint, str]:
    """With the field that asks for it. Raises HttpError where several do."""
    form, structured = request.response_format, request.structured_outputs
    found: dict[str, tuple[str, Any]] = {}
    if form is not None and form.type != "text":
        found["response_format"] = ("json_schema", _get_schema(form))
    if structured is not None:
        for name, value in (("json", structured.json_), ("regex", structured.regex), ("choice", structured.choice)):
            if value is not None:
                found[f"structured_outputs.{name}"] = (name, value)
        if structured.json_object:
            found["structured_outputs.json_object"] = ("json", _ANY_OBJECT)
    for name in ("json", "regex", "choice"):
        if (value := getattr(request, f"guided_{name}")) is not None:
            found[f"guided_{name}"] = (name, value)
    if len(found) > 1:
        raise refused(max(found), f"not together with {min(found)}")
    return {_KINDS[kind]: _text(value) for kind, value in found.values()}, "".join(found)


_KINDS = {"json_schema": "json_schema", "json": "json_schema", "regex": "regex", "choice": "choices"}


def _get_schema(form: Any) -> Any:
    if form.type == "json_object":
        return _ANY_OBJECT
    if form.json_schema is None:
        raise refused("response_format.json_schema", "it is missing")
    return _ANY_OBJECT if form.json_schema.schema_ is None else form.json_schema.schema_


def _text(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value)
    return tuple(value) if isinstance(value, list) else value


def make_chat(request: Conversation, *, has_tools: bool = True, **arguments: Any) -> Chat:
    """has_tools: the template is given them. arguments: of the template, beside those that the request has."""
    given = {**arguments, **(request.chat_template_kwargs or {})}
    if request.documents is not None:
        given["documents"] = request.documents
    return Chat(
        [_message(message) for message in request.messages],
        tools=[tool.model_dump(exclude_none=True) for tool in request.tools or ()] if has_tools else (),
        template_arguments=given,
        continue_final_message=bool(request.continue_final_message),
        add_generation_prompt=request.add_generation_prompt,
    )


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without fields that say nothing; an assistant that said nothing has the empty text, which templates expect."""
    kept = {name: value for name, value in message.items() if value is not None and name not in NO_EFFECT_OF_MESSAGES}
    if message.get("role") == "assistant":
        kept.setdefault("content", "")
    return kept
