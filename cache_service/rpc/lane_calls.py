"""Calls that a step lane carries beside its steps, at less cost than gRPC: those that a running engine makes for its sequences.

Owns which calls these are, and the form of one: the length of its name in a byte, the name, and the unchanged bytes of its
request. None of them keeps the steps behind it waiting for long, and every role that may step may make them.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from kvkeeper.common.service.methods import snake_case

from ..core.values.errors import InvalidField
from ..runtime.live_session import LiveSession
from .create_handler import CreateHandler
from .methods import CONTRACT, prompt_limit

LANE_CALLS = ("CreateSequences", "HandOffSequence", "TakeSequence", "WithdrawHandOff")


class LaneCalls:
    """Makes the calls of lanes."""

    def __init__(
        self, handlers: Mapping[str, Callable[..., Any]], creates: CreateHandler, max_tokens: Callable[[], int]
    ) -> None:
        """handlers: by the RPC's name in snake case. max_tokens: of a sequence of any pool that there is now."""
        self._functions = {name: handlers[snake_case(name)] for name in LANE_CALLS}
        self._functions["CreateSequences"] = creates.create_some  # most need no task
        self._contract = replace(CONTRACT, prompt_limit=lambda method: prompt_limit(method, max_tokens()))

    def apply(self, raw: bytes, bound: LiveSession) -> Message | Awaitable[Message]:
        """The answer to a call of the bound session; awaitable where it waits for anything. Raises CacheError."""
        end = 1 + raw[0] if raw else 0
        name = raw[1:end].decode(errors="replace")
        if name not in self._functions:
            raise InvalidField(f"a lane carries the calls {', '.join(LANE_CALLS)}", field="request")
        request: Any = self._contract.parse(CONTRACT.service.methods_by_name[name], raw[end:])
        if request.session_id != bound.core.id:
            raise InvalidField("a lane carries the requests of one session", field="session_id")
        answer: Message | Awaitable[Message] = self._functions[name](request)
        return answer
