"""The carriers of steps as raw clients of any language meet them: a StreamSteps call, or a step lane, behind one face."""

import asyncio
import os
import socket
from typing import Any

import grpc.aio

from kvkeeper.client.attaching import attaching
from kvkeeper.client.errors import parse_error
from tests.support.worlds.cache_api import DEADLINE, Api, Session

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
STEP_REQUEST, STEP_RESPONSE, STATUS, TOO_LARGE = b"\1", b"\2", b"\3", b"\4"
CALL, CALL_RESPONSE = b"\5", b"\6"
_MAX_FRAME_BYTES = 8 << 20


def call_frame(method: str, request: bytes) -> bytes:
    """The frame of a call."""
    return CALL + bytes((len(method),)) + method.encode() + request


def attach_lane(session: Session, *parts: str) -> socket.socket:
    """The socket that the service hands to this very process; blocking, to be called in a thread."""
    opened = session.opened
    with attaching(opened.attach_socket_path, opened.attach_token, DEADLINE, *(parts or ("step-lane",))) as handed_over:
        lane = handed_over.take_lane()
    handed_over.connection.close()
    assert lane is not None
    lane.setblocking(False)
    return lane


class LaneStream:
    """A step lane with the methods of a grpc.aio stream call."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    async def write(self, raw: bytes) -> None:
        await self.write_frame(STEP_REQUEST + raw)

    async def write_frame(self, frame: bytes) -> None:
        self.socket.send(frame)

    async def read(self) -> Any:
        """The answer to a step or to creates, or EOF. Raises KvkeeperError for a Status."""
        frame = await self.read_frame()
        if frame[:1] == STATUS:
            raise parse_error(frame[1:])
        assert frame[:1] in (STEP_RESPONSE, CALL_RESPONSE, b""), frame[:1]
        return frame[1:] if frame else EOF

    async def read_frame(self) -> bytes:
        """Empty at the end."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await asyncio.wait_for(loop.sock_recv(self.socket, _MAX_FRAME_BYTES), DEADLINE)
            except ConnectionResetError:
                continue  # told before the frames that were sent before it

    async def done_writing(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def cancel(self) -> None:
        self.socket.close()


class StepCarriers:
    """Opens streams of one kind, and closes the sockets that a test left."""

    def __init__(self, api: Api, kind: str) -> None:
        self.kind = kind
        self._api = api
        self._lanes: list[LaneStream] = []

    async def open(self, session: Session) -> Any:
        """A stream for the session; a lane can be had once a session."""
        if self.kind == "grpc":
            return self._api.raw_stream()
        lane = LaneStream(await asyncio.to_thread(attach_lane, session))
        self._lanes.append(lane)
        return lane

    async def stepping(self, session: Session, raw: bytes) -> tuple[Any, bytes]:
        """A stream with one step on it, and the answer."""
        stream = await self.open(session)
        await stream.write(raw)
        return stream, await stream.read()

    def close(self) -> None:
        for lane in self._lanes:
            lane.cancel()


def num_open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
