"""An answer as blocks, one after another: a thought, a text, or a call of a tool."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from kvkeeper.client import Usage
from kvkeeper.http.answering import Work, read_chunks
from kvkeeper.http.chats import ChatWriter
from kvkeeper.http.responses import CallArguments, CallStart, Content, Piece, Reasoning


@dataclass(frozen=True, slots=True)
class Begin:
    """A block begins. kind: that of the pieces in it; call: what is called."""

    kind: type[Reasoning] | type[Content] | type[CallArguments]
    call: CallStart | None


@dataclass(frozen=True, slots=True)
class Add:
    """Further text of the block."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The block ends."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer ends, for the engine's reason."""

    reason: str | None
    usage: Usage


Step = Begin | Add | End | Finish


async def read_blocks(work: Work, writer: ChatWriter, *, with_thoughts: bool = True) -> AsyncGenerator[Step | None, None]:
    """The steps of the answer. The first is None, once there is something of the answer. Raises HttpError."""
    reason: str | None = None
    kind: type[Piece] | None = None
    is_begun = False
    async with aclosing(read_chunks(work)) as found:
        async for _, chunk in found:
            if not is_begun:
                is_begun = True
                yield None
            if isinstance(chunk, Usage):
                if kind is not None:
                    yield End()
                yield Finish(reason, chunk)
                return
            reason = chunk.finish_reason or reason
            for piece in writer.read(chunk):
                if isinstance(piece, Reasoning) and not with_thoughts:
                    continue
                call = piece if isinstance(piece, CallStart) else None
                new = CallArguments if isinstance(piece, CallStart) else type(piece)
                if call is not None or new is not kind:
                    if kind is not None:
                        yield End()
                    kind = new
                    yield Begin(new, call)
                if not isinstance(piece, CallStart):
                    yield Add(piece.text)
