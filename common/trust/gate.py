"""Gate: in front of every call of a server; it finds the caller, and lets the call in or refuses it.

Rules: a call that is refused reaches no handler, and no byte of its message is read. The caller is found once a call, before
its first message, from the call's metadata or the certificate of its connection; a stream is not looked at again. A call
without a row in the table is refused. A token that is wrong is not made good by a certificate, nor by the socket.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_status import rpc_status

from kvkeeper.common.service.intake import EOF
from kvkeeper.common.trust.caller import ANY_TENANT, Caller, Role, note_caller
from kvkeeper.common.trust.certificate_names import decode_names
from kvkeeper.common.trust.credentials import KnownCallers
from kvkeeper.common.trust.refusals import (
    NO_CERTIFICATE,
    NO_CREDENTIAL,
    WRONG_CERTIFICATE,
    WRONG_TOKEN,
    Refusal,
    RefusedCalls,
    role_refusal,
)
from kvkeeper.common.trust.roles import OPEN, get_roles, is_known

# Of a Unix socket: its file has mode 0600, so its other end is this user or root, who could read all memory anyway.
SOCKET_OWNER = Caller("socket owner", ANY_TENANT, Role.OPERATOR)
# Of a server that knows no names: the authority was made to say who may operate it.
CERTIFIED = Caller("certificate", ANY_TENANT, Role.OPERATOR)

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class Gate(grpc.aio.ServerInterceptor):
    """known: None where there are no tokens; certified: whether connections have certificates."""

    def __init__(
        self, known: KnownCallers | None, refused: RefusedCalls, *, is_private_socket: bool = False, certified: bool = False
    ) -> None:
        self._known, self._refused = known, refused
        self._is_private_socket, self._certified = is_private_socket, certified

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = handler_call_details.method
        if path in OPEN:
            return await continuation(handler_call_details)
        find = partial(self._by_metadata, handler_call_details.invocation_metadata)
        found = find()
        if found is None:
            handler = await continuation(handler_call_details)
            return None if handler is None else self._with_certificate(path, handler)
        found = self._admit(path, found, find)
        return _refusing(found) if isinstance(found, Refusal) else await continuation(handler_call_details)

    def _by_metadata(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> Caller | Refusal | None:
        """The caller; None: its certificate has to name it."""
        shown = [value for key, value in metadata or () if key == "authorization"]
        if shown:
            scheme, _, token = str(shown[0]).partition(" ")
            if self._known is None or len(shown) > 1 or scheme.lower() != "bearer":
                return WRONG_TOKEN
            return self._known.now().by_token(token) or WRONG_TOKEN
        if self._certified:
            return None
        return SOCKET_OWNER if self._is_private_socket else NO_CREDENTIAL

    def _by_certificate(self, context: grpc.aio.ServicerContext) -> Caller | Refusal:
        peer_facts = context.auth_context()
        if not peer_facts.get("x509_pem_cert"):  # there is no connection without one; should there be, it is no operator's
            return NO_CERTIFICATE
        if self._known is None:
            return CERTIFIED
        names = [*peer_facts.get("peer_dns", ()), *peer_facts.get("peer_uri", ())]
        if not peer_facts.get("x509_subject_alternative_name"):
            names = list(peer_facts.get("x509_common_name", ()))
        texts = decode_names(next(iter(peer_facts["x509_pem_cert"])), tuple(names))
        return self._known.now().by_certificate(texts) or WRONG_CERTIFICATE

    def _admit(self, path: str, found: Caller | Refusal, find: Callable[[], Caller | Refusal | None]) -> Caller | Refusal:
        """The caller, noted for the handler; or why the call is not let in, counted. find: finds it again."""
        name = ""
        if isinstance(found, Caller):
            if found.role in get_roles(path):
                note_foreign = partial(self._refused.note, "TENANT_NOT_ALLOWED", path, found.name)
                caller = found
                note_caller(caller, note_foreign, lambda: find() == caller)
                return found
            name, found = found.name, role_refusal(found.role.value)
        self._refused.note(found.reason, path if is_known(path) else "", name)
        return found

    def _with_certificate(self, path: str, handler: Any) -> Any:
        """The handler behind the gate: a certificate is known only once there is a context, so the message waits."""

        async def let_in(context: grpc.aio.ServicerContext) -> None:
            find = partial(self._by_certificate, context)
            found = self._admit(path, find(), find)
            if isinstance(found, Refusal):
                await _abort(context, found)

        async def unary(messages: Any, context: grpc.aio.ServicerContext) -> Any:
            await let_in(context)
            return await _called(handler, messages, context)

        async def stream(messages: Any, context: grpc.aio.ServicerContext) -> None:
            await let_in(context)
            answer = await _called(handler, messages, context)
            if answer is not None:
                async for response in answer:
                    await context.write(response)

        parse = handler.request_deserializer if handler.request_streaming else None
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, parse, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(unary, parse, handler.response_serializer)


async def _called(handler: Any, messages: Any, context: grpc.aio.ServicerContext) -> Any:
    """What the handler gives: a message, or the messages of a stream; None: it has written them itself."""
    if handler.request_streaming:
        function = handler.stream_stream if handler.response_streaming else handler.stream_unary
        answer = function(messages, context)
    else:
        raw = await context.read()
        if raw is EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        message = raw if handler.request_deserializer is None else handler.request_deserializer(raw)
        function = handler.unary_stream if handler.response_streaming else handler.unary_unary
        answer = function(message, context)
    return answer if hasattr(answer, "__aiter__") else await answer


def _refusing(refusal: Refusal) -> Any:
    """A handler that reads nothing. On the wire every call is a stream of messages each way."""

    async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await _abort(context, refusal)

    return grpc.stream_stream_rpc_method_handler(refuse)


async def _abort(context: Any, refusal: Refusal) -> None:
    await context.abort_with_status(rpc_status.to_status(refusal.status))
