"""The engine service as the front's callers see it: with a caller's own key, or, where it asks for none, for all callers.

The engine alone knows keys: a bearer token is shown to it, and decides on the tenant there. The front has no token of its own.
Where other hosts reach the front, an engine that asks for no keys is not shown to them.
What the engine says of its model is kept for some seconds; what its tokens spell is kept as long as the model is the same.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace

import grpc
import structlog

from kvkeeper.client import AsyncEngineClient, CallOptions, Credentials, KvkeeperError
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.http.errors import HttpError
from kvkeeper.http.responses import Form, WrongTemplate, choose_form, template_form

log = structlog.get_logger()
_MODEL_S = 5.0
_HEALTH_S = 0.9  # Kubernetes' probes wait for 1 s, and the client would look for an engine that is away for longer
_MOST_PIECES = 4096  # of one call


class Engine:
    """The engine for callers with one key."""

    def __init__(self, client: AsyncEngineClient, form: Form | None) -> None:
        """form: that of the model's output; None: as its chat template shows, or else as it declares."""
        self.client = client
        self._given_form = form
        self._asked_at = 0.0
        self.spelled: dict[int, bytes] = {}  # the bytes of tokens that were asked for
        self.model: pb.GetModelResponse
        self.form: Form

    async def refresh(self) -> None:
        """Asks what it serves, where that is not known of late. Raises KvkeeperError."""
        if self._asked_at and time.monotonic() - self._asked_at < _MODEL_S:
            return
        model = await self.client.model()
        if not self._asked_at or model.revision != self.model.revision:
            self.spelled = {}
            given = self._given_form
            self.form = await asyncio.to_thread(_form, model) if given is None else given
        self.model, self._asked_at = model, time.monotonic()

    async def spell(self, token_ids: Iterable[int]) -> dict[int, bytes]:
        """The bytes of these tokens, and of others. Raises KvkeeperError."""
        pieces = self.spelled
        unknown = list(set(token_ids) - pieces.keys())
        for start in range(0, len(unknown), _MOST_PIECES):
            asked = unknown[start : start + _MOST_PIECES]
            pieces.update(zip(asked, await self.client.pieces(asked), strict=True))
        return pieces


def _form(model: pb.GetModelResponse) -> Form:
    """A family's form that knows its calls goes before what the model declares: calls come as they are written then."""
    form = choose_form(model.chat_template or None, None)
    if form.calls or not model.response_template:
        return form
    try:
        return template_form(model.response_template)
    except WrongTemplate as error:
        log.warning("response_template_not_used", form=form.name, error=str(error))
        return form


class Engines:
    """One engine by the keys of callers."""

    def __init__(self, target: str, form: Form | None = None, *, needs_keys: bool = False) -> None:
        """
        Args:
            target: address of the engine service.
            form: as for Engine.
            needs_keys: whether callers are served only by an engine that asks for keys.

        Raises KvkeeperError.
        """
        self._target, self._form, self._needs_keys = target, form, needs_keys
        self._credentials = replace(Credentials.of_environment(), token_file=None)
        self._open = Engine(self._connect(""), form)
        self._by_key: dict[str, Engine] = {}  # of keys that the engine knows

    def _connect(self, key: str) -> AsyncEngineClient:
        return AsyncEngineClient(self._target, CallOptions(), replace(self._credentials, token=key))

    async def find(self, key: str) -> Engine:
        """The engine for this key; empty: none was shown. Raises KvkeeperError, and HttpError where keys are needed."""
        if key in self._by_key:
            await self._by_key[key].refresh()
            return self._by_key[key]
        try:
            await self._open.refresh()
        except KvkeeperError as error:
            if error.code is not grpc.StatusCode.UNAUTHENTICATED or not key:
                raise
        else:
            if self._needs_keys:
                raise HttpError(503, "other hosts reach this address, and the engine asks for no keys: it needs --auth-tokens")
            return self._open
        engine = Engine(self._connect(key), self._form)
        try:
            await engine.refresh()
        except BaseException:
            await engine.client.close()
            raise
        return self._by_key.setdefault(key, engine)

    async def is_serving(self) -> bool:
        """Whether the engine takes requests. An engine that is away is waited for for less time than a probe waits."""
        try:
            async with asyncio.timeout(_HEALTH_S):
                await self._open.client.model()
        except TimeoutError:
            return False
        except KvkeeperError as error:
            return error.code is grpc.StatusCode.UNAUTHENTICATED  # it is there, and asks for a key
        return True

    async def close(self) -> None:
        for engine in (self._open, *self._by_key.values()):
            await engine.client.close()
