"""POST /v1/completions: text, lists of texts, token ids, lists of them."""

import uuid
from collections.abc import Sequence
from typing import Any

from kvkeeper.client import KvkeeperError, OutputChunk
from kvkeeper.http.answering import Work, check_streaming
from kvkeeper.http.asking import EngineRequest, ask, find_constraint, make_options
from kvkeeper.http.calls import Call
from kvkeeper.http.engines import Engine
from kvkeeper.http.errors import of_engine, refused
from kvkeeper.http.fields import CompletionRequest, read
from kvkeeper.http.tokens import CompletionLogprobs, Pieces, prompt_logprobs

_MOST_PROMPTS = 1024
_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_REASONS = {"length": "length", "stop": "stop", "end_of_sequence": "stop", None: None}


async def complete(call: Call) -> Work:
    """Raises HttpError, KvkeeperError."""
    request = read(CompletionRequest, call.body)
    engine = await call.engine(request.model)
    prompts = _prompts(request.prompt)
    _check(request, len(prompts))
    request_id = request.request_id or f"cmpl-{uuid.uuid4().hex}"
    max_tokens = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if request.echo and request.logprobs is not None:
        request.prompt_logprobs, shows_prompt = request.logprobs, False
    else:
        shows_prompt = request.prompt_logprobs is not None
    constraint, form = find_constraint(request)
    asked = []
    for place, prompt in enumerate(prompts):
        own_id = request_id if len(prompts) == 1 else f"{request_id}-{place}"
        options = make_options(request, own_id, constraint, max_tokens, request.logprobs, False, request.best_of)
        shows_ids = bool(request.echo or request.return_token_ids or request.prompt_logprobs is not None or request.counts_on)
        asked.append(await ask(engine, prompt, options, "prompt", form, shows_ids=shows_ids))
    if request.echo and request.logprobs is not None:
        await engine.spell(token for each in asked for token in each.ids or ())
    echoed = [await _text(engine, prompt) for prompt in prompts] if request.echo else None
    return Work(request_id, engine, asked, request, _Writer(request, asked, echoed, shows_prompt=shows_prompt))


def _prompts(given: Any) -> list[Any]:
    """Each a text or token ids. Raises HttpError."""
    prompts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not 1 <= len(prompts) <= _MOST_PROMPTS or not all(prompt or isinstance(prompt, str) for prompt in prompts):
        raise refused("prompt", f"1 to {_MOST_PROMPTS} prompts, each a text or one token id or more")
    return prompts


def _check(request: CompletionRequest, num_prompts: int) -> None:
    check_streaming(request)
    if request.echo and request.logprobs is not None:
        if request.prompt_logprobs is not None:
            raise refused("prompt_logprobs", "echo with logprobs tells them")
        if request.stream and (request.n or 1) > 1:
            raise refused("n", "1 in a stream with echo and logprobs")


async def _text(engine: Engine, prompt: str | Sequence[int]) -> str:
    """Raises HttpError."""
    try:
        return prompt if isinstance(prompt, str) else await engine.client.detokenize(prompt)
    except (KvkeeperError, ValueError) as error:
        raise of_engine(error) if isinstance(error, KvkeeperError) else refused("prompt", str(error)) from None


class _Writer:
    kind = part_kind = "text_completion"

    def __init__(
        self, request: CompletionRequest, asked: Sequence[EngineRequest], echoed: Sequence[str] | None, *, shows_prompt: bool
    ) -> None:
        """echoed: texts of the prompts, where they are part of the answer."""
        self._request, self._asked, self._echoed, self._shows_prompt = request, asked, echoed, shows_prompt
        self._logprobs: dict[tuple[int, int], CompletionLogprobs] = {}  # of choices that have begun
        self._of_prompt: dict[int, OutputChunk] = {}  # by place, the chunk with the prompt's log probabilities

    def part(self, place: int, chunk: OutputChunk, pieces: Pieces) -> dict[str, Any]:
        request, asked = self._request, self._asked[place]
        logprobs = self._logprobs.get((place, chunk.index))
        if is_first := logprobs is None:
            logprobs = self._logprobs[place, chunk.index] = CompletionLogprobs()
        has_output = request.max_tokens != 0
        if chunk.prompt_logprobs:
            self._of_prompt[place] = chunk
        text = chunk.text if has_output else ""
        positions: list[Any] = list(chunk.logprobs) if has_output else []
        if is_first and self._echoed is not None:
            text = self._echoed[place] + text
            known = self._of_prompt[place].prompt_logprobs if place in self._of_prompt else ()
            positions = [*(asked.ids or ())[:1], *known, *positions]
        found: dict[str, Any] = {"text": text, "logprobs": None, "finish_reason": _REASONS[chunk.finish_reason]}
        if request.logprobs is not None:
            found["logprobs"] = logprobs.add(positions, pieces)
        if request.return_token_ids:
            found["token_ids"] = chunk.token_ids if has_output else ()
            if is_first:
                found["prompt_token_ids"] = asked.ids
        return found

    def whole(self, place: int, chunk: OutputChunk, pieces: Pieces) -> dict[str, Any]:
        found = self.part(place, chunk, pieces)
        if self._shows_prompt:
            of_prompt = self._of_prompt.get(place)
            found["prompt_logprobs"] = prompt_logprobs(() if of_prompt is None else of_prompt.prompt_logprobs, pieces)
        return found

    def further(self, pieces: Pieces) -> dict[str, Any]:
        return {}

    async def usage_details(self, engine: Engine) -> dict[str, Any]:
        return {}
