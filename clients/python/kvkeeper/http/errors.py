"""What clients get when a request fails: a status, and an object `error` as OpenAI's has it.

400 is never worth a repeat, 429 and 503 say after how many seconds one is. What the engine refuses keeps its text, with the
names that the fields have over HTTP.
"""

import math
from collections.abc import Mapping
from typing import Any

import grpc

from kvkeeper.client.errors import KvkeeperError

_STATUSES = {
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.ALREADY_EXISTS: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          413: "invalid_request_error", 429: "rate_limit_error"}  # fmt: skip
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_NAMES = {"num_logprobs": "logprobs", "num_prompt_logprobs": "prompt_logprobs", "num_beams": "n"}
_CONSTRAINTS = {"json_schema", "regex", "choices"}
_REPEATED = (429, 503)


class HttpError(Exception):
    """An answer that is no success. param: the field that is wrong; code: a name of the error for programs."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code or _CODES.get(status)
        self.retry_after = max(1, math.ceil(retry_after or 0)) if status in _REPEATED else None

    @property
    def kind(self) -> str:
        return _TYPES.get(self.status, "server_error")

    def body(self) -> Mapping[str, Any]:
        """As JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def refused(param: str, why: str) -> HttpError:
    return HttpError(400, f"{param}: {why}", param)


def too_long(limit: int, num_prompt: int, num_new: int, where: str) -> HttpError:
    """where: the field with the prompt."""
    text = (
        f"This model's maximum context length is {limit} tokens. However, you requested {num_prompt + num_new} tokens"
        f" ({num_prompt} in the {where}, {num_new} in the completion). Please reduce the length of the {where} or completion."
    )
    return HttpError(400, text, where, "context_length_exceeded")


def of_engine(error: KvkeeperError, where: str = "prompt", num_new: int = 1, form: str = "") -> HttpError:
    """where: the field with the prompt; num_new: tokens that were asked for; form: the field with the form of the output."""
    metadata = error.metadata
    if error.reason == "NEVER_FITS" and "requested" in metadata:
        return too_long(int(metadata["limit"]), int(metadata["requested"]) - num_new, num_new, where)
    field = metadata.get("field", "")
    if field in ("text", "chat") and "limit" in metadata:
        text = f"The {where} is longer than this model's maximum context length: {error.message}"
        return HttpError(400, text, where, "context_length_exceeded")
    if field.startswith("chat.") or field in ("text", "token_ids", "chat"):
        return HttpError(_STATUSES.get(error.code, 500), error.message, field.removeprefix("chat.") if "." in field else where)
    last = field.rpartition(".")[2]
    name = form if last in _CONSTRAINTS and form else _NAMES.get(last, last)
    text = error.message.replace(field, name) if field else error.message or error.code.name.lower().replace("_", " ")
    return HttpError(_STATUSES.get(error.code, 500), text, name or None, retry_after=error.retry_after)
