"""The smaller calls: which model there is, tokens of a text and texts of tokens."""

import time
from typing import Any

from kvkeeper.http.asking import get_tokens, make_chat
from kvkeeper.http.calls import Call
from kvkeeper.http.errors import HttpError
from kvkeeper.http.fields import ChatToTokenize, DetokenizeRequest, TextToTokenize, read, read_json

_STARTED_AT = int(time.time())


async def list_models(call: Call) -> dict[str, Any]:
    """GET /v1/models. Raises KvkeeperError, HttpError."""
    return {"object": "list", "data": [await show_model(call, None)]}


async def show_model(call: Call, name: str | None) -> dict[str, Any]:
    """GET /v1/models/NAME."""
    model = (await call.engine(name)).model
    return {"id": model.model_id, "object": "model", "created": _STARTED_AT, "owned_by": "kvkeeper",
            "max_model_len": model.max_tokens_per_sequence}  # fmt: skip


async def tokenize(call: Call) -> dict[str, Any]:
    """POST /tokenize: of a text as a completion's prompt has them, or of a conversation."""
    is_chat = "messages" in read_json(call.body)
    request = read(ChatToTokenize, call.body) if is_chat else read(TextToTokenize, call.body)
    engine = await call.engine(request.model, request.messages if isinstance(request, ChatToTokenize) else None)
    where = "messages" if is_chat else "prompt"
    prompt = make_chat(request) if isinstance(request, ChatToTokenize) else request.prompt
    tokens = await get_tokens(engine, prompt, where)
    found = {"count": len(tokens), "max_model_len": engine.model.max_tokens_per_sequence, "tokens": tokens}
    if request.return_token_strs:
        pieces = await engine.spell(tokens)
        found["token_strs"] = [pieces[token].decode(errors="replace") for token in tokens]
    return found


async def detokenize(call: Call) -> dict[str, Any]:
    """POST /detokenize."""
    request = read(DetokenizeRequest, call.body)
    engine = await call.engine(request.model)
    try:
        return {"prompt": await engine.client.detokenize(request.tokens)}
    except ValueError as error:  # a number that is no token id
        raise HttpError(400, f"tokens: {error}", "tokens") from None
