"""Calls on the prefix cache of a pool, beside the steps: pins, hints and stored logits."""

from typing import NamedTuple

import numpy as np

from ..blocks.pins import MAX_PIN_TTL, MAX_PINS, MIN_PIN_TTL, Pin
from ..pool_state import PoolState
from ..values.errors import InvalidField, OutOfBlocks, OutOfPins, UnknownLogits, UnknownPin, WrongState
from ..values.scopes import get_tenant
from ..values.types import NO_INT32, Int32Array, ReuseHint, SequenceState, SessionId
from .clear import Clearing, ClearResult


class PinResult(NamedTuple):
    """The blocks that a pin holds; pin_id is empty where it holds none."""

    pin_id: str
    num_tokens: int


class PrefixCalls:
    """Pins prefixes of one pool, and stores logits behind them."""

    def __init__(self, state: PoolState) -> None:
        self._state = state

    def pin(self, session: SessionId, pin_id: str, scope: str, token_ids: Int32Array, ttl: float) -> PinResult:
        """Keeps what is cached of a prefix for ttl seconds, as far as pins have room. pin_id is new and hard to guess.

        Raises UnknownSession, InvalidField, OutOfPins, OutOfBlocks: some of it is cached, and pins have room for no part of it.
        """
        self._state.session(session)
        if not MIN_PIN_TTL <= ttl <= MAX_PIN_TTL:
            raise InvalidField("ttl_ms is 1 to a day's", field="ttl_ms", limit=round(MAX_PIN_TTL * 1000))
        pins, index = self._state.pins, self._state.index
        pins.expire(self._state.now)
        if len(pins) >= MAX_PINS:
            raise OutOfPins(f"all {MAX_PINS} pins are in use", limit=MAX_PINS)
        root = index.find_root(scope)
        tenant = int(index.roots.tenant_of[-root])
        num_entries, blocks, num_wanted = self._fitting(tenant, self._match(root, token_ids))
        if not num_entries:
            if num_wanted:
                available = max(0, pins.room(tenant))
                text = f"{num_wanted} blocks are to be pinned, and pins have room for {available} more of this tenant"
                raise OutOfBlocks(text, requested=num_wanted, available=available)
            return PinResult("", 0)
        self._state.revision += 1
        pins.add(pin_id, Pin(session, tenant, blocks, self._state.now + ttl, num_entries))
        self._state.update_pressure()
        return PinResult(pin_id, num_entries * self._state.config.block_size)

    def hint(
        self,
        session: SessionId,
        scope: str,
        token_ids: Int32Array,
        hint: ReuseHint,
        seconds: float = 0.0,
        *,
        prefetch: bool = False,
    ) -> int:
        """Notes what is known of the reuse of a cached prefix, as if a sequence that had it ended now. Returns its tokens.

        seconds: that SOON is at least. prefetch: what a tier below has behind it is brought up. It is a use of these
        blocks, which are those of the first group of layers. Raises UnknownSession.
        """
        self._state.session(session)
        pool, index, below = self._state.pool, self._state.index, self._state.below
        if hint is not ReuseHint.UNSPECIFIED:
            pool.heed_hints()
        root = index.find_root(scope)
        path = index.block_of_node[self._match(root, token_ids)]
        self._state.revision += 1
        pool.pin(path)
        if pool.reuse is not None:
            pool.reuse.note_hint(int(index.roots.tenant_of[-root]), path, hint, seconds)
        pool.unpin(path[::-1])
        if prefetch and below is not None and index.roots.has_room_for(scope):
            root = index.root(scope)
            pool.limits.name_tenant(get_tenant(scope), int(index.roots.tenant_of[-root]))
            below.prefetch(root, token_ids)
        return len(path) * self._state.config.block_size

    def _match(self, root: int, token_ids: Int32Array) -> Int32Array:
        """The nodes of a prefix that are cached on the device, from the root down."""
        index = self._state.index
        nodes = index.match(root, token_ids, len(token_ids) // self._state.config.block_size)
        blocks = index.block_of_node[nodes]
        if np.count_nonzero(blocks) < len(blocks):  # a block that is in the host tier only cannot be held here
            blocks = blocks[: int(np.argmin(blocks > 0))]
        if (is_over := self._state.pool.limits.outlived(blocks)).any():
            blocks = blocks[: int(np.argmax(is_over))]
        return nodes[: len(blocks)]

    def _fitting(self, tenant: int, nodes: Int32Array) -> tuple[int, Int32Array, int]:
        """The longest hit on these nodes that pins have room for: its entries, and its blocks of all groups of layers.

        The last number is of the blocks that no pin holds yet and that the whole hit would take.
        """
        pins, index, num_groups = self._state.pins, self._state.index, len(self._state.config.group_spans)
        if num_groups == 1:
            blocks = index.block_of_node[nodes]
            fitting = pins.fitting(tenant, blocks)
            return len(fitting), fitting, pins.num_new(blocks)
        num_wanted = 0
        while len(nodes := index.held.usable(nodes)):
            blocks = index.held.hit_table(nodes)[0]
            blocks = blocks[blocks > 0]
            num_wanted = num_wanted or pins.num_new(blocks)
            num_above = pins.num_above(tenant, blocks)
            if num_above <= 0:
                return len(nodes), blocks, num_wanted
            nodes = nodes[: -num_above // num_groups]  # an entry less is at most a block less of each group
        return 0, NO_INT32, num_wanted

    def unpin(self, session: SessionId, pin_id: str) -> None:
        """Raises UnknownSession, UnknownPin: no pin of the session has the id, or it has ended by itself."""
        self._state.session(session)
        pins = self._state.pins
        pins.expire(self._state.now)
        pin = pins.get(pin_id)
        if pin is None or pin.owner != session:
            raise UnknownPin("no live pin of this session has this id")
        self._state.revision += 1
        pins.end_pin(pin_id)
        self._state.update_pressure()

    def store_logits(self, session: SessionId, sequence_id: int, num_tokens: int, logits: bytes) -> None:
        """Stores the logits that follow the first num_tokens of a sequence, for starts whose prompt is just these. Idempotent.

        Raises UnknownSession, UnknownSequence, InvalidField, WrongState (not cached, or nothing is stored here).
        """
        _, slot = self._state.find_sequence(session, sequence_id)
        seqs, index, is_on = self._state.sequences, self._state.index, self._state.config.logits_memory > 0
        committed, size = int(seqs.num_committed[slot]), self._state.config.block_size
        if num_tokens % size or not size <= num_tokens <= committed:
            raise InvalidField("whole blocks of committed tokens", field="num_tokens", limit=committed // size * size)
        num_blocks = num_tokens // size
        node = 0
        if num_blocks <= seqs.num_published[slot]:
            node = int(index.node_of_block[seqs.tables.get(slot)[num_blocks - 1]])
        if not is_on or not node:
            state = SequenceState(int(seqs.states[slot])).name
            text = "this prefix is not cached" if is_on else "no logits are stored here, see --logits-memory"
            raise WrongState(text, sequence_id=sequence_id, state=state)
        index.logits.check(logits)
        index.logits.put(node, logits)

    def read_logits(self, session: SessionId, sequence_id: int) -> bytes:
        """The logits that the start of a sequence was promised, until its step is completed.

        Raises UnknownSession, UnknownSequence, UnknownLogits.
        """
        owner, _ = self._state.find_sequence(session, sequence_id)
        held = owner.logits.get(sequence_id)
        if held is None:
            raise UnknownLogits("none were promised, or the step has completed", sequence_id=sequence_id)
        return held.logits

    def begin_clearing(self) -> Clearing:
        """Forgets every cached block, slice by slice; blocks in use lose their index entry, and pins end."""
        return Clearing(self._state)

    def clear(self) -> ClearResult:
        """The same in one go."""
        clearing = self.begin_clearing()
        while clearing.clear_some():
            pass
        return clearing.end()
