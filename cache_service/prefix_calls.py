"""Calls on the prefix cache of a pool that are about no sequence: pins.

Beside the steps, which they change nothing of but what can be evicted.
"""

from typing import NamedTuple

from cache_service.errors import InvalidField, OutOfPins, UnknownPin
from cache_service.pins import MAX_PIN_TTL, MAX_PINS, MIN_PIN_TTL, Pin
from cache_service.step_core import StepCore
from cache_service.types import Int32Array, SessionId


class PinResult(NamedTuple):
    """What a pin holds; pin_id is empty where that is nothing."""

    pin_id: str
    num_tokens: int


class PrefixCalls(StepCore):
    """See the module."""

    def pin_prefix(self, session: SessionId, pin_id: str, tenant: str, token_ids: Int32Array, ttl: float) -> PinResult:
        """Keeps what is cached of a prefix for ttl seconds, as far as pins have room. pin_id is new and hard to guess.

        Raises UnknownSession, InvalidField, OutOfPins.
        """
        self._owner(session)
        if not MIN_PIN_TTL <= ttl <= MAX_PIN_TTL:
            raise InvalidField("ttl_ms is 1 to a day's", field="ttl_ms", limit=round(MAX_PIN_TTL * 1000))
        pins, index = self.tables.pins, self.tables.index
        pins.expire(self.now)
        if len(pins) >= MAX_PINS:
            raise OutOfPins(f"all {MAX_PINS} pins are in use", limit=MAX_PINS)
        nodes = index.match(index.find_root(tenant), token_ids, len(token_ids) // self.config.block_size)
        blocks = pins.fitting(index.block_of_node[nodes])
        if not len(blocks):
            return PinResult("", 0)
        self.revision += 1
        pins.add(pin_id, Pin(session, blocks, self.now + ttl))
        self._note_change()
        return PinResult(pin_id, len(blocks) * self.config.block_size)

    def unpin_prefix(self, session: SessionId, pin_id: str) -> None:
        """Raises UnknownSession, UnknownPin: no pin of the session has the id, or it has ended by itself."""
        self._owner(session)
        pins = self.tables.pins
        pins.expire(self.now)
        pin = pins.get(pin_id)
        if pin is None or pin.owner != session:
            raise UnknownPin("no live pin of this session has this id")
        self.revision += 1
        pins.end(pin_id)
        self._note_change()
