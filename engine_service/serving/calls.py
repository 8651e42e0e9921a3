"""FrontCalls: the calls of one front in the engine, from their messages to their ends, and the tokens of its requests.

A call has its turn here, among those of all fronts, and runs in a task of its own, as the caller that the front names. What is
new of all requests leaves together, by rounds. When the front is gone, its calls end, and its requests are cancelled; what was
submitted goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from google.protobuf.descriptor import MethodDescriptor

from kvkeeper.common import tracing
from kvkeeper.common.service.fair_queue import TooManyWaiting
from kvkeeper.common.service.intake import SMALL_BYTES, forget_frames
from kvkeeper.common.service.methods import Contract, peer, snake_case
from kvkeeper.common.service.turns import Turns
from kvkeeper.common.trust.caller import note_caller
from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..outputs.generation import Generation
from ..outputs.model_text import ModelText
from ..outputs.unread_tokens import UnreadTokens
from ..rpc.methods import CONTRACT, FRONTS_OWN
from ..rpc.stream_pace import HasUnread, StreamPace
from ..values.errors import EngineError
from ..values.output_chunk import OutputChunk, Send, coalesce
from .frames import Admitted, Kind, Message
from .lane import Lane

_GENERATE = CONTRACT.service.methods_by_name["Generate"]
GENERATE_PATH = f"/{CONTRACT.service.full_name}/Generate"
_NUM_CONTEXT_TOKENS = 16  # as much of a prompt's end as matters to the text behind it


class AdmitForFront(Protocol):
    """Queues a request of which a front makes the text."""

    def __call__(self, message: pb.GenerateRequest, send: Send, *, makes_text: bool) -> Awaitable[Generation]: ...


@dataclass(frozen=True, slots=True)
class ServedMethod:
    """One method that fronts forward calls of."""

    contract: Contract
    method: MethodDescriptor
    function: Callable[[Any], Any]  # from a message to a message, or to an iterator of them


def served_methods(contract: Contract, service: Any) -> dict[str, ServedMethod]:
    """The methods that fronts forward, by path; the service has a method for each, in snake case."""
    return {
        f"/{contract.service.full_name}/{method.name}": ServedMethod(
            contract, method, getattr(service, snake_case(method.name))
        )
        for method in contract.service.methods
        if method.name not in contract.unimplemented and method.name not in FRONTS_OWN
    }


@dataclass(frozen=True, slots=True)
class FrontServices:
    """What the calls of fronts need of the engine."""

    methods: Mapping[str, ServedMethod]
    turns: Turns
    admit: AdmitForFront
    stop_at: Callable[[Generation, int, int], None]  # a continuation's text met a stop string with so many tokens
    counted: Callable[[], AbstractContextManager[None]]  # for as long as a stream is not written to its end
    pace: StreamPace
    note_foreign: Callable[[str, str], None]  # path, name of the caller: it named a tenant that is not its
    text: ModelText
    unread: UnreadTokens  # of all requests
    contract: Contract = CONTRACT  # our own, with limits


@dataclass(slots=True, eq=False)
class _Call:
    number: int
    unsent: list[OutputChunk] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    taken: asyncio.Event = field(default_factory=asyncio.Event)  # its last answer was written
    over: asyncio.Event = field(default_factory=asyncio.Event)  # its last was sent, or the front dropped it
    refusal: EngineError | None = None  # with which its request has ended
    generation: Generation | None = None
    has_begun: bool = False  # some of its output was sent
    is_dropped: bool = False
    counted: ExitStack = field(default_factory=ExitStack)

    def end(self) -> None:
        self.is_dropped = True
        self.over.set()
        if self.generation is not None:
            self.generation.cancel()
        elif self.task is not None:
            self.task.cancel()
        self.counted.close()


class FrontCalls:
    """The calls of one front, made when its lane is open, and ended when the lane is lost."""

    def __init__(self, services: FrontServices, lane: Lane) -> None:
        self._services, self._lane = services, lane
        self._calls: dict[int, _Call] = {}
        self._urgent: dict[_Call, None] = {}  # those that do not wait for a round, in order
        self._unread: dict[_Call, None] = {}  # those that do
        self._has_unread = HasUnread(services.pace)
        self._has_room = asyncio.Event()
        lane.on_room = self._has_room.set
        self._notifying = asyncio.create_task(self._notify_rounds())

    @property
    def num_open(self) -> int:
        """Calls that are not over."""
        return len(self._calls)

    def take(self, kind: Kind, number: int, body: Any) -> None:
        """A frame that says something of a call."""
        if kind is Kind.MESSAGE:
            self._begin(number, body)
            return
        if (call := self._calls.get(number)) is None:
            return
        if kind is Kind.TAKEN:
            call.taken.set()
        elif kind is Kind.STOPPED and call.generation is not None:
            self._services.stop_at(call.generation, body.index, body.num_tokens)
        elif kind is Kind.BROKEN and call.generation is not None:
            call.generation.fail(body)
        elif kind is Kind.DROPPED:
            del self._calls[number]
            call.end()

    def end(self) -> None:
        """The front is gone."""
        self._notifying.cancel()
        self._services.unread.drop_reader(self)
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.end()

    def _begin(self, number: int, message: Message) -> None:
        call = self._calls[number] = _Call(number)
        call.task = asyncio.create_task(self._serve(call, message))

    async def _serve(self, call: _Call, message: Message) -> None:
        peer.set(message.peer)
        note_caller(message.caller, partial(self._services.note_foreign, message.path, message.caller.name))
        try:
            async with self._services.turns.turn(message.peer) as place:
                if len(message.raw) <= SMALL_BYTES:
                    place.leave()
                await self._serve_turn(call, message)
        except TooManyWaiting as error:
            self._lane.send(Kind.FULL, call.number, error.limit)

    async def _serve_turn(self, call: _Call, message: Message) -> None:
        with tracing.serving(message.path[1:], message.trace) as span:
            try:
                await (self._generate(call, message.raw) if message.path == GENERATE_PATH else self._answer(call, message))
            except EngineError as error:
                tracing.fail(span, error.reason)
                self._lane.send(Kind.ERROR, call.number, error)
                forget_frames(error)  # what made it may refer to it, and it to the call's message
            except Exception:
                bug = CONTRACT.hide_bug(message.path)
                assert isinstance(bug, EngineError)
                tracing.fail(span, bug.reason)
                self._lane.send(Kind.ERROR, call.number, bug)
            else:
                if span is not None and call.generation is not None:
                    await call.over.wait()  # the span is that of the whole stream
                    if call.refusal is not None:
                        tracing.fail(span, call.refusal.reason)

    async def _answer(self, call: _Call, message: Message) -> None:
        served = self._services.methods[message.path]
        request = served.contract.parse(served.method, message.raw)
        if not served.method.server_streaming:
            self._lane.send(Kind.ANSWER, call.number, (await served.function(request)).SerializeToString())
        else:
            responses = served.function(request)
            try:
                async for response in responses:
                    call.taken.clear()
                    self._lane.send(Kind.ANSWER, call.number, response.SerializeToString())
                    await call.taken.wait()
            finally:
                await responses.aclose()
        self._lane.send(Kind.END, call.number)

    async def _generate(self, call: _Call, raw: bytes) -> None:
        message = self._services.contract.parse(_GENERATE, raw)
        assert isinstance(message, pb.GenerateRequest)
        generation = await self._services.admit(message, partial(self._put, call), makes_text=False)
        call.generation = generation
        call.counted.enter_context(self._services.counted())
        context = generation.request.prompt[-_NUM_CONTEXT_TOKENS:].tolist()
        admitted = Admitted(generation.request_id, not generation.outputs[0].has_text, context)
        self._lane.send(Kind.ADMITTED, call.number, admitted)
        generation.let_read(self, call.number)
        if call.unsent or call.refusal is not None:
            self._notify(call, at_once=True)

    # -- tokens

    def notify(self) -> None:
        """There are columns of tokens to take, see UnreadTokens."""
        self._has_unread.notify(at_once=False)

    def _put(self, call: _Call, output: OutputChunk | EngineError) -> None:
        if isinstance(output, EngineError):
            call.refusal = output
        else:
            call.unsent.append(output)
        if call.generation is not None:
            is_last = isinstance(output, EngineError) or output.usage is not None
            self._notify(call, at_once=is_last or not call.has_begun)

    def _notify(self, call: _Call, *, at_once: bool) -> None:
        (self._urgent if at_once else self._unread)[call] = None
        self._has_unread.notify(at_once=at_once)

    async def _notify_rounds(self) -> None:
        while True:
            has_round = await self._has_unread.wait()
            while self._lane.is_full:
                self._has_room.clear()
                await self._has_room.wait()
            self._send_unread(has_round=has_round)

    def _send_unread(self, *, has_round: bool) -> None:
        """What is new and does not wait for a round; has_round: of all calls. Columns hold what came behind the rest."""
        unread, self._urgent = self._urgent, {}
        if has_round:
            unread, self._unread = unread | self._unread, {}
        for call in unread:
            if call.is_dropped:
                continue
            call.has_begun, chunks, call.unsent = True, call.unsent, []
            for chunk in coalesce(chunks) if self._services.pace.merges else chunks:
                self._lane.send(Kind.CHUNK, call.number, chunk)
            if call.refusal is not None:
                self._lane.send(Kind.ERROR, call.number, call.refusal)
            if call.refusal is not None or (chunks and chunks[-1].usage is not None):
                call.over.set()
        if has_round and len((columns := self._services.unread.take_columns(self)).numbers):
            self._lane.send(Kind.TOKENS, 0, columns)
