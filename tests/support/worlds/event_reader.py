"""A reader of a watch, and what it should know: names and replay as any client would write them from the proto's comments."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from kvkeeper.cache_service.core.index.events.watch import Event, Watch
from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.values.types import EventKind, PressureLevel, Tier

SPEC_KEY = b"spec"


def first_parent(tenant: str, spec_key: bytes = SPEC_KEY) -> bytes:
    return hashlib.sha256(spec_key + b"\0" + tenant.encode()).digest()


def block_name(parent_name: bytes, tokens: list[int]) -> bytes:
    return hashlib.sha256(parent_name + np.array(tokens, "<i4").tobytes()).digest()


def name_behind(parent_name: bytes, tokens: bytes) -> bytes:
    """tokens: LE32."""
    return hashlib.sha256(parent_name + tokens).digest()


def names_in(index: PrefixIndex, tenant: str) -> dict[bytes, Tier]:
    """Every block that the index has for the tenant, by name, found from the root down without any of the feed's memory."""
    found: dict[bytes, Tier] = {}
    above = [(index.find_root(tenant), first_parent(tenant))]
    while above:
        parent, parent_name = above.pop()
        for node in index.links.children(parent, 10**9) if parent else []:
            name = block_name(parent_name, index.key_tokens(node)[1].tolist())
            found[name] = Tier.DEVICE if index.block_of_node[node] else Tier.HOST
            above.append((node, name))
    return found


@dataclass
class EventReader:
    """Applies events in order; an event that cannot be applied is a fault of the feed."""

    tenant: str
    watch: Watch
    blocks: dict[bytes, Tier] = field(default_factory=dict)
    pressure: PressureLevel | None = None
    is_complete: bool = False
    kinds: list[EventKind] = field(default_factory=list)
    told: list[tuple[EventKind, Tier | None]] = field(default_factory=list)  # of each block

    def read(self, most: int = 10**9) -> None:
        for _ in range(most):
            event = self.watch.take_event()
            if event is None:
                return
            self.apply(event)

    def _check_tokens(self, event: Event) -> None:
        if not self.watch.wants_tokens:
            assert not event.tokens
            return
        for name, parent, tokens in zip(event.names, event.parents, event.tokens, strict=True):
            assert name == hashlib.sha256(parent + tokens).digest(), "the tokens of another block"

    def apply(self, event: Event) -> None:
        self.kinds.append(event.kind)
        self.told += [(event.kind, event.tier)] * len(event.names)
        if event.kind in (EventKind.SNAPSHOT, EventKind.STORED):
            assert not (self.is_complete and event.kind is EventKind.SNAPSHOT)
            self._check_tokens(event)
            for name, parent in zip(event.names, event.parents, strict=True):
                assert name not in self.blocks, "told of twice"
                assert parent in self.blocks or parent == first_parent(self.tenant), "told of before its parent"
                self.blocks[name] = event.tier or Tier.DEVICE
        elif event.kind is EventKind.REMOVED:
            for name in event.names:
                del self.blocks[name]
        elif event.kind is EventKind.TIER_CHANGED:
            for name in event.names:
                assert name in self.blocks
                assert event.tier is not None
                self.blocks[name] = event.tier
        else:
            self.pressure = event.pressure
            assert not (self.is_complete and event.kind is EventKind.SNAPSHOT_END)
            self.is_complete = self.is_complete or event.kind is EventKind.SNAPSHOT_END
