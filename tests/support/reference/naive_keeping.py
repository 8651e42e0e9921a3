"""What the reference model makes of what keeps cached prefixes and what forgets them: pins, time, clearing, eviction on demand.

A pin is a list of blocks that it holds until its time is over.
"""

from dataclasses import dataclass

from kvkeeper.cache_service.core.values.types import BlockState, MatchEnd, ReuseHint
from tests.support.reference.naive_cache import Key, NaiveCache, NaiveSequence, expect, require, tenant_of

_HINTING = "what holds a prefix while a hint is noted"


@dataclass
class NaivePin:
    """One live pin."""

    session: str
    scope: str
    blocks: list[int]
    deadline: float


class NaiveKeeping(NaiveCache):
    """The reference model, with pins and the time that ends them, and calls that forget."""

    def pinned_blocks(self, tenant: str | None = None) -> set[int]:
        """The blocks that pins hold, of a tenant or of all."""
        return {block for pin in self.pins.values() if tenant in (None, tenant_of(pin.scope)) for block in pin.blocks}

    def can_pin(self, scope: str, tokens: list[int]) -> bool:
        """Whether nothing of the prefix is cached, or pins have room for some of it."""
        return not self.match(scope, tokens) or bool(self.pinnable(scope, tokens))

    def pinnable(self, scope: str, tokens: list[int]) -> list[int]:
        """The leading blocks of a prefix that pins have room for: half the pool in all, and the tenant's quota."""
        taken, own = self.pinned_blocks(), self.pinned_blocks(tenant_of(scope))
        blocks: list[int] = []
        for block in self.match(scope, tokens):
            if len(taken | {block}) > self.config.num_usable_blocks // 2 or len(own | {block}) > self.quota():
                break
            taken.add(block)
            own.add(block)
            blocks.append(block)
        return blocks

    def pin(self, session: str, scope: str, tokens: list[int], ttl: float, found: tuple[str, int]) -> None:
        """The core says it pinned so many tokens under this id."""
        self.clock += 1
        blocks = self.pinnable(scope, tokens)
        pin_id, num_tokens = found
        expect(num_tokens, len(blocks) * self.block_size, "tokens pinned")
        expect(bool(pin_id), bool(blocks), "a pin of nothing has no id")
        if blocks:
            self.pins[pin_id] = NaivePin(session, scope, blocks, self.now + ttl)
            self.claim_blocks(None, blocks)
        self.settle()

    def hint(self, session: str, scope: str, tokens: list[int], hint: ReuseHint, seconds: float, num_tokens: int) -> None:
        """The core noted a hint of so many tokens of a prefix."""
        self.clock += 1
        blocks, size = self.match(scope, tokens), self.block_size
        expect(num_tokens, len(blocks) * size, "tokens that a hint reached")
        self.heed(hint)
        self.settle()
        self.pins[_HINTING] = NaivePin(session, scope, blocks, self.now)
        self.claim_blocks(None, blocks)
        if self.children is not None:
            keys = [(scope, tuple(tokens[:end])) for end in range(size, len(blocks) * size + 1, size)]
            self.note_hint(tenant_of(scope), keys, blocks, hint, seconds)
        self.unpin(_HINTING)

    def unpin(self, pin_id: str) -> None:
        self.clock += 1
        for block in self.pins.pop(pin_id).blocks:
            self.ages.pop(block, None)
        self.settle()

    def pass_time(self, seconds: float) -> None:
        """What falls due by then has happened, but for what is above the limits."""
        self.now += seconds
        self.clock += 1
        for pin_id in self.soonest_first():
            if self.pins[pin_id].deadline <= self.now:
                self.unpin(pin_id)
        self.lapse_soon(self.now)
        if self.config.prefix_ttl is not None:
            self.expire(int((self.now - self.config.prefix_ttl) * 1000))

    def expire(self, last_ms: int) -> None:
        """Forgets what came to be cached by this millisecond, and what hangs below it."""
        by_block, num_cached = {block: key for key, block in self.index.items()}, len(self.cached())
        for block, age in self.ages.items():
            if int(self.times[age] * 1000) <= last_ms:
                self.forget(by_block[block], MatchEnd.EXPIRED)
        self.num_expired += num_cached - len(self.cached())
        self.settle()

    def excess(self) -> int:
        """How many cached blocks are above the limits."""
        cached = [key for key, block in self.index.items() if block in self.ages]
        excess = sum(len(keys) - self.share_left(tenant) for tenant, keys in self.over_quota(cached).items())
        if self.config.max_cached_blocks is not None:
            excess = max(excess, len(cached) - self.config.max_cached_blocks)
        return excess

    def enforce(self, max_blocks: int, left: list[int]) -> None:
        """The core has looked at its limits, and these blocks left the index: of tenants above their quota first."""
        self.clock += 1
        self.victims, self.num_granted = [block for block in left if block in self.ages], min(self.excess(), max_blocks)
        self.evict("limits", left)
        self.settle()

    def store_logits(self, key: Key, logits: bytes) -> None:
        self.logits.pop(key, None)
        self.logits[key] = logits
        while sum(map(len, self.logits.values())) > self.config.logits_memory:
            del self.logits[next(iter(self.logits))]

    def full_hit(self, q: NaiveSequence, max_hit: int) -> bytes | None:
        """The logits that follow the whole prompt, where it may be a hit and all of it is cached; a use of them."""
        key, num_blocks = (q.scope, tuple(q.tokens)), len(q.tokens) // self.block_size
        may_hit = max_hit >= len(q.tokens) >= self.config.min_prefix_tokens and num_blocks <= self.num_shareable(q)
        if not may_hit or key not in self.logits:
            return None
        self.logits[key] = self.logits.pop(key)
        return self.logits[key]

    def can_give_way(self, q: NaiveSequence, num_short: int, besides: list[int]) -> bool:
        """Whether pins end for a sequence that lacks so many blocks: it is alone, and nothing less will do."""
        if any(other.running for other in self.holders if other is not q):
            return False
        if num_short <= self.count(BlockState.FENCED):
            return False
        in_use = {block for other in self.holders for block in other.table} | set(besides)
        in_use |= {*self.fences, *self.quarantine}
        return len({block for pin in self.pins.values() for block in pin.blocks} - in_use) >= num_short

    def give_way(self, q: NaiveSequence, num_short: int, besides: list[int]) -> bool:
        """Ends pins, the soonest to end first, until there is room, or changes nothing."""
        if num_short <= 0 or not self.can_give_way(q, num_short, besides):
            return False
        target = self.room_beside(besides) + num_short
        for pin_id in self.soonest_first():
            if self.room_beside(besides) >= target:
                break
            self.unpin(pin_id)
        return True

    def soonest_first(self) -> list[str]:
        return sorted(self.pins, key=lambda pin_id: self.pins[pin_id].deadline)

    def room_beside(self, blocks: list[int]) -> int:
        """Blocks that could be had if these were held."""
        return self.num_available() - len(self.cached().intersection(blocks))

    def clear(self) -> tuple[int, int]:
        """Returns (blocks that came free, entries forgotten)."""
        self.pins.clear()
        num_cached, num_entries = len(self.cached()), len(self.index)
        self.misses.gone.update(dict.fromkeys(self.index, MatchEnd.CLEARED))
        self.index.clear()
        self.classes.clear()
        self.children = None if self.children is None else {}
        self.logits.clear()
        self.commits.clear()
        for q in self.holders:
            q.published = 0
        for session in self.sessions if self.config.prefix_caching else ():
            self.clock += 1  # each session's are noted in one go
            for q in sorted(self.of(session), key=lambda q: q.sequence_id):
                if q.running:
                    self.commits.append((self.clock, q))
        self.settle()
        return num_cached, num_entries

    def evict_to(self, num_free: int, answered: int, left: list[int]) -> None:
        """The core says it evicted so many, and these blocks left the index."""
        cached = self.cached()
        wanted = min(max(0, num_free - self.num_free()), len(cached))
        expect(answered, wanted, "blocks evicted on demand")
        oldest_first = sorted(cached.intersection(left), key=lambda b: self.ages[b])
        require(len(oldest_first) >= wanted, f"{answered} evicted, but only {oldest_first} left the index")
        self.victims, self.num_granted = oldest_first, wanted
        self.evict("eviction on demand", left)
        self.settle()
