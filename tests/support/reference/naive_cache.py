"""The reference model: what a pool must answer, with dicts and lists and no thought for speed.

Owns: sessions, sequences with their counters and tables, the prefix index by whole token prefixes, fences, quarantine.
Rules: written from the protocol, not from the core. It is told what the core answered; where the core is free (which block
it grants, which leaf of equal age it evicts) it checks that the choice was allowed, everywhere else that the answer equals
its own. A Mismatch names the rule of the design that was broken.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvkeeper.cache_service.core.blocks.reuse_order import SOON_SECONDS
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import Retention
from kvkeeper.cache_service.core.values.types import NULL_BLOCK, BlockState, Executor, MatchEnd, ReuseHint
from tests.support.reference.naive_hints import Key, NaiveHints, tenant_of
from tests.support.reference.naive_misses import NaiveMisses


class Mismatch(AssertionError):
    """The core and the reference disagree."""


def expect(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise Mismatch(f"{what}: the core says {found}, the reference {wanted}")


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Mismatch(what)


@dataclass
class NaiveSequence:
    """One sequence; `granted_at` is its reserved length after each step that changed it."""

    session: str
    sequence_id: int
    scope: str
    tokens: list[int]
    max_tokens: int
    args: tuple[object, ...] = ()
    running: bool = False
    committed: int = 0
    reserved: int = 0
    hit: int = 0
    table: list[int] = field(default_factory=list)
    granted_at: dict[int, int] = field(default_factory=dict)
    published: int = 0  # leading blocks that the index names
    retention: Retention | None = None

    def readable(self, length: int) -> set[int]:
        """Positions that may be read when so many tokens are committed."""
        if self.retention is None:
            return set(range(length))
        sink, window = self.retention.num_sink_tokens, self.retention.num_window_tokens
        return {i for i in range(length) if i < sink or i >= length - window}

    def can_be_cut(self, length: int, block_size: int) -> bool:
        """Whether what a sequence of this length reads is still there."""
        if self.retention is None:
            return True
        length = min(length, self.committed)
        return all(self.table[position // block_size] for position in self.readable(length))

    priority: int = 0
    start_number: int = 0
    hint: ReuseHint = ReuseHint.UNSPECIFIED
    retain_seconds: float = 0.0
    has_said: bool = False  # its hint counts already, and a part of its blocks was given back
    claim: Any = None  # see naive_claims
    num_waits: int = 0  # answers COMPUTING since it could last hit more than before
    longest_hit: int = 0  # that it could have had when it asked

    def writable(self, block_size: int) -> list[int]:
        """Blocks that a step of its session may write."""
        return self.table[self.committed // block_size :]

    @property
    def as_offered(self) -> tuple[object, ...]:
        """Another value once its session has done anything with it."""
        return self.running, len(self.tokens), self.committed, self.reserved, tuple(sorted(self.granted_at.items()))

    def granted_as_of(self, step_id: int) -> int:
        return next((n for step, n in sorted(self.granted_at.items(), reverse=True) if step <= step_id), self.committed)


@dataclass
class NaiveSession:
    """One session; a step is in flight when its id is above completed."""

    executor: Executor
    number: int = 0  # in the order of opening
    step_id: int = 0
    completed: int = 0
    is_one_item: bool = False
    updates: list[tuple[int, int, int]] = field(default_factory=list)  # sequence, table index, block; not told yet


class NaiveCache:
    """One pool."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.sessions: dict[str, NaiveSession] = {}
        self.sequences: dict[tuple[str, int], NaiveSequence] = {}
        self.index: dict[Key, int] = {}
        self.closing: list[NaiveSequence] = []  # of sessions that ended, not given back yet
        self.reclaim_at_once = 10**9  # blocks
        self.commits: list[tuple[int, NaiveSequence]] = []  # with their clock: not passed by publishing yet
        self.fences: dict[int, dict[str, int]] = {}  # block: session: the completed step that ends it
        self.quarantine: dict[int, set[str]] = {}
        self.may_write: set[str] = set()  # sessions that ended and may still write
        self.filling: dict[int, tuple[str, int]] = {}  # block that a copy fills: the session, and the step that makes it
        self.pins: dict[str, Any] = {}  # see naive_keeping
        self.logits: dict[Key, bytes] = {}  # the least recently used first
        self.promised: dict[tuple[str, int], tuple[int, bytes]] = {}  # sequence: the step of its start, logits
        self.now = 0.0
        self.ages: dict[int, int] = {}  # cached block: the operation since which it could be evicted
        self.tenants: dict[int, str | None] = {}  # block: the tenant of the tokens that it held last; None: unknown
        self.seen_tenants: set[str] = set()
        self.foreign: list[int] = []  # granted in this operation, last held by another tenant
        self.cleared: list[int] = []  # cleared in this operation
        self.classes: dict[int, int] = {}  # indexed block: -1 after NONE, 1 to 3 after SOON; else 0
        self.children: dict[Key, int] | None = None  # that each was ever given, since there are hints
        self.lapses: dict[int, int] = {}  # cached block: the operation in which it was no longer expected soon
        self.hints = NaiveHints(config.num_blocks)
        self.class_of: Callable[[int], int] = lambda block: 0  # as the pool has it now
        self.victims: list[int] = []  # evicted since the last time it was judged
        self.num_granted = 0  # blocks, since then
        self.num_free_before = 0  # at the first of them
        self.clock = 0
        self.times: dict[int, float] = {}  # of each operation
        self.num_evicted = self.num_expired = self.num_quota_evictions = 0
        self.num_copies = 0
        self.num_adopted = 0
        self.num_hit_tokens = 0
        self.misses = NaiveMisses()
        self.num_retention_dropped = 0
        self.num_changes = 0  # items that changed one sequence

    # What the state says

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def of(self, session: str) -> list[NaiveSequence]:
        return [q for q in self.sequences.values() if q.session == session]

    def num_shareable(self, q: NaiveSequence) -> int:
        """Leading blocks that may be published and hit: attention was whole for them, and no hole comes before."""
        if q.retention is None:
            return len(q.tokens)
        limit = (q.retention.num_sink_tokens + q.retention.num_window_tokens) // self.block_size
        return min(limit, q.table.index(NULL_BLOCK)) if NULL_BLOCK in q.table else limit

    @property
    def pending(self) -> list[NaiveSequence]:
        """Sequences that were committed further since they were published."""
        return [q for _, q in self.commits]

    @property
    def holders(self) -> list[NaiveSequence]:
        """Everything that has a table, and a slot."""
        return [*self.sequences.values(), *self.closing]

    def num_holders(self, block: int) -> int:
        return sum(block in q.table for q in self.holders) + sum(block in p.blocks for p in self.pins.values())

    def states(self) -> list[BlockState]:
        """Rule R1: the one state of every block."""
        states = [BlockState.FREE] * self.config.num_blocks
        for held, state in (
            (self.index.values(), BlockState.CACHED),
            (self.fences, BlockState.FENCED),
            (self.quarantine, BlockState.QUARANTINED),
            *((q.table, BlockState.REFERENCED) for q in self.holders),
            *((pin.blocks, BlockState.REFERENCED) for pin in self.pins.values()),
        ):
            for block in held:
                states[block] = state
        states[0] = BlockState.NULL
        return states

    def count(self, state: BlockState) -> int:
        return self.states().count(state)

    def held(self) -> set[int]:
        """Blocks that are referenced, fenced or quarantined: no sequence can have them now."""
        held = set(self.fences).union(
            self.quarantine, *[q.table for q in self.holders], *[pin.blocks for pin in self.pins.values()]
        )
        held.discard(NULL_BLOCK)
        return held

    def cached(self) -> set[int]:
        """Indexed blocks that an eviction could free now."""
        return set(self.index.values()) - self.held()

    def num_available(self) -> int:
        """Free blocks and those an eviction could free now."""
        return self.config.num_usable_blocks - len(self.held())

    def num_free(self) -> int:
        return self.config.num_usable_blocks - len(self.held().union(self.index.values()))

    def key(self, q: NaiveSequence, block_idx: int) -> Key:
        return q.scope, tuple(q.tokens[: (block_idx + 1) * self.block_size])

    def hit(self, q: NaiveSequence, limit: int) -> list[int]:
        """Blocks that a start finds, of at most so many tokens; none where they are too few to count."""
        match = self.match(q.scope, q.tokens[: limit // self.block_size * self.block_size])[: self.num_shareable(q)]
        return match if len(match) * self.block_size >= self.config.min_prefix_tokens else []

    def match(self, scope: str, tokens: list[int]) -> list[int]:
        """Blocks of the longest cached prefix, whole blocks."""
        blocks: list[int] = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block = self.index.get((scope, tuple(tokens[:end])))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def must_copy(self, q: NaiveSequence, granted: int) -> int | None:
        """Table index of the block that a write into [committed, granted) must copy first (rule R5)."""
        if granted <= q.committed:
            return None
        block_idx = q.committed // self.block_size
        if block_idx >= len(q.table):
            return None
        block = q.table[block_idx]
        shared = self.num_holders(block) > 1 or self.is_still_indexed(block)
        shared = shared or any(session != q.session for session in self.fences.get(block, ()))
        return block_idx if shared else None

    def is_still_indexed(self, block: int) -> bool:
        """In the index, and not below a block that this operation has evicted already and `evict` has yet to judge.

        Behind its holes a sequence holds blocks without their parents.
        """
        keys = [key for key, held in self.index.items() if held == block]
        evicted = [key for key, held in self.index.items() if held in self.victims] if keys and self.victims else []
        return any(not any(k[0] == g[0] and k[1][: len(g[1])] == g[1] for g in evicted) for k in keys)

    def commit_bound(self, q: NaiveSequence, num_new: int) -> int:
        completed = self.sessions[q.session].completed
        return max(q.committed, min(len(q.tokens) + num_new, q.granted_as_of(completed)))

    # Changes that several operations share

    def let_go(self, session: str, block: int, *, still_used: bool = False) -> None:
        """A table entry is given up: fenced while a step that may touch it is in flight (rule R6).

        Still used: by the last step itself, which copies it away or was told of it.
        """
        if block == NULL_BLOCK:
            return
        self.ages.pop(block, None)
        s = self.sessions[session]
        ends = s.step_id if still_used else s.step_id - 1
        if s.completed < ends:
            fences = self.fences.setdefault(block, {})
            fences[session] = max(ends, fences.get(session, 0))

    def settle(self) -> None:
        """Notes what came to be cached in this operation; the age of a cached block is the operation that made it so."""
        self.ages = {block: self.ages.get(block, self.clock) for block in self.cached().union(self.victims)}
        self.times[self.clock] = self.now
        self.lapses = {block: clock for block, clock in self.lapses.items() if clock >= self.ages.get(block, clock + 1)}
        self._bound_soon()

    def take(self, q: NaiveSequence, session: str, sequence_id: int) -> None:
        """Another session has the sequence from now on."""
        del self.sequences[q.session, q.sequence_id]
        giver = self.sessions[q.session]
        giver.updates = [update for update in giver.updates if update[0] != q.sequence_id]
        q.session, q.sequence_id, q.claim = session, sequence_id, None
        q.granted_at = {self.sessions[session].completed: q.reserved}
        self.sequences[session, sequence_id] = q

    def complete(self, session: str, completed: int) -> None:
        self.sessions[session].completed = completed
        for block, fences in list(self.fences.items()):
            if session in fences and fences[session] <= completed:
                del fences[session]
            if not fences:
                del self.fences[block]
        self.filling = {b: by for b, by in self.filling.items() if by[0] != session or by[1] > completed}
        self.promised = {of: held for of, held in self.promised.items() if of[0] != session or held[0] > completed}

    def forget(self, key: Key, cause: MatchEnd = MatchEnd.EVICTED) -> None:
        """A node leaves the index, and with it what hangs below it."""
        tenant, tokens = key
        for other in [k for k in self.index if k[0] == tenant and k[1][: len(tokens)] == tokens]:
            self.classes.pop(self.index.pop(other), None)
            self.misses.gone[other] = cause
            self.logits.pop(other, None)
            if self.children is not None:
                self.children.pop(other, None)
        for q in self.holders:
            if q.published and self.key(q, q.published - 1) not in self.index:
                q.published = 0

    def publish(self, max_blocks: int = 10**9, reported_now: str = "") -> bool:
        """Full committed blocks become shareable; where the content is indexed already, the indexed block is taken.

        Whether more is left but for what waits for a copy. reported_now: the session with a reply that is yet to be written.
        """
        group = -1
        for commit in list(self.commits):
            clock, q = commit
            num_full, num_ready = self.num_to_publish(q)
            if max_blocks <= 0 and clock != group:
                break
            group = clock  # one commit is looked at whole, also when only a part of it is published
            if q.published >= num_full:
                self.commits.remove(commit)
            elif max_blocks > 0 and q.published < num_ready:  # else the copy of its next block is still in flight
                last = min(num_ready, q.published + max_blocks)
                max_blocks -= last - q.published
                for block_idx in range(q.published, last):
                    self._publish_block(q, block_idx, still_used=reported_now != q.session)
                q.published = last
                if last == num_full:
                    self.commits.remove(commit)
        self.settle()
        return any(q.published < self.num_to_publish(q)[1] for q in self.pending)

    def publish_those(self, leaving: list[NaiveSequence]) -> None:
        """Of sequences that are about to end, all that can be published; their session is told in the reply to come."""
        if self.config.prefix_caching:
            for q in leaving:
                num_ready = self.num_to_publish(q)[1] if q.running else 0
                for block_idx in range(q.published, num_ready):
                    self._publish_block(q, block_idx, still_used=False)
                q.published = max(q.published, num_ready)
            self.settle()

    def could_grow(self, q: NaiveSequence, max_hit: int) -> bool:
        """Whether a pending block would make the match of a waiting sequence longer."""
        size = self.block_size
        limit = min(min(max_hit, len(q.tokens) - 1) // size, self.num_shareable(q)) * size
        num_found = len(self.match(q.scope, q.tokens[:limit]))
        wanted = q.tokens[: (num_found + 1) * size]
        rivals = [other for other in self.pending if other.running and other.scope == q.scope]
        rivals = [other for other in rivals if self.num_to_publish(other)[0] > num_found]
        return num_found * size < limit and any(other.tokens[: len(wanted)] == wanted for other in rivals)

    def num_to_publish(self, q: NaiveSequence) -> tuple[int, int]:
        """Leading blocks that are full and may be shared, and how many of them come before one that a copy is yet to fill."""
        num_full = min(q.committed // self.block_size, self.num_shareable(q))
        return num_full, next((idx for idx in range(q.published, num_full) if q.table[idx] in self.filling), num_full)

    def _publish_block(self, q: NaiveSequence, block_idx: int, *, still_used: bool) -> None:
        own = q.table[block_idx]
        if self.key(q, block_idx) not in self.index and self.children is not None:
            parent = q.scope, tuple(q.tokens[: block_idx * self.block_size])
            self.children[parent] = self.children.get(parent, 0) + 1
            self.hints.num_published += 1
            if q.hint is ReuseHint.NONE:
                self.classes[own] = -1
        known = self.index.setdefault(self.key(q, block_idx), own)
        self.claim_blocks(q, [known])
        if known != own:
            self.num_adopted += 1
            self.sessions[q.session].updates.append((q.sequence_id, block_idx, known))
            q.table[block_idx] = known
            self.let_go(q.session, own, still_used=still_used)

    def grant(self, blocks: list[int], scope: str, what: str) -> None:
        """The core took these blocks, evicting what it had to, and no more."""
        require(len(set(blocks)) == len(blocks), f"R1 {what}: a block granted twice in {blocks}")
        states, own = self.states(), tenant_of(scope)
        if not self.num_granted:
            self.num_free_before = states.count(BlockState.FREE)
        evicted: list[int] = []
        for block in blocks:
            require(0 < block < self.config.num_blocks, f"R1 {what}: no such block {block}")
            state = states[block]
            require(state in (BlockState.FREE, BlockState.CACHED), f"R6 {what}: block {block} granted, is {state.value}")
            if state is BlockState.CACHED:
                evicted.append(block)
            if self.tenants.get(block, own) != own and len(self.seen_tenants) > 1:
                self.foreign.append(block)
            self.tenants[block] = own
        self.num_granted += len(blocks)
        self.victims += evicted

    def split_copies(self, sources: list[int], destinations: list[int]) -> list[tuple[int, int]]:
        """Takes out the copies of the null block, by which a block is cleared; returns the copies-on-write."""
        pairs = list(zip(sources, destinations, strict=True))
        self.cleared = [destination for source, destination in pairs if source == NULL_BLOCK]
        return [pair for pair in pairs if pair[0] != NULL_BLOCK]

    def check_cleared(self) -> None:
        """Rule R8: a block that changed its tenant was cleared, or written whole by a copy."""
        expect(sorted(self.cleared), sorted(self.foreign), "R8 blocks cleared for another tenant")
        self.foreign, self.cleared = [], []

    def evict(self, what: str, extra: Iterable[int] = ()) -> None:
        """Leaves before parents, by LRU the oldest first, equals in any order; what hangs below goes with its parent.

        Judges what was evicted since the last call; `extra` blocks may have come free as descendants of one. A parent that
        could be evicted before its descendants (they were fenced for longer) may go first.
        """
        needed = max(0, self.num_granted - self.num_free_before)
        num_chosen = num_freed = 0  # evicted; come free by it, what hung below included
        self.num_granted = self.num_free_before = 0
        left = set(self.victims)
        over = self.over_quota(self._cached_keys(left))
        excess = {tenant: len(keys) - self.share_left(tenant) for tenant, keys in over.items()}
        while left:
            by_block = {block: key for key, block in self.index.items()}
            cached = list(map(self.index.__getitem__, self._cached_keys(left)))
            parents = {(tenant, tokens[: -self.block_size]) for tenant, tokens in map(by_block.__getitem__, cached)}
            leaves = [block for block in cached if by_block[block] not in parents]
            lowest = min((self.classes.get(block, 0) for block in cached), default=0)
            groups = [[block for block in cached if self.classes.get(block, 0) == lowest]]
            if lowest > 0:  # of the tenants that have most, each what has its shortest time
                soon = self._soon_by_tenant(cached).values()
                most = [blocks for blocks in soon if len(blocks) == max(map(len, soon))]
                lows = [min(self.classes[block] for block in blocks) for blocks in most]
                groups = [[b for b in blocks if self.classes[b] == low] for blocks, low in zip(most, lows, strict=True)]
            of_class = [block for group in groups for block in group]
            over = self.over_quota(map(by_block.__getitem__, cached))
            self.num_quota_evictions += bool(over)
            if over:
                candidates = [
                    c for keys in over.values() for c in self._next([self.index[key] for key in keys], leaves, by_block)
                ]
            elif self.config.eviction_policy == "lru":
                ages = self.ages | self.lapses
                candidates = [block for group in groups for block in self._next(group, leaves, by_block, ages)]
            else:
                candidates = [block for block in of_class if self._waits_longer_than_below(block, by_block)]
                candidates += [block for block in leaves if block in of_class]
            if not over:  # blocks above quotas are chosen together, also where those that hang below one of them are enough
                late = [block for block in cached if excess.get(tenant_of(by_block[block][0]), 0) > 0]
                candidates = candidates + (self._next(late, leaves, by_block) if late else [])
            # A tenant's excess is chosen without regard to hints, so it explains what nothing else does.
            # What goes with a parent counts for it.
            highest = {b: max(self.classes.get(c, 0) for c in left if _is_within(by_block[c], by_block[b])) for b in left}
            chosen = max((b for b in candidates if b in left), key=highest.__getitem__, default=None)
            require(chosen is not None, f"{what}: {sorted(left)} evicted, but {candidates} are older")
            assert chosen is not None
            tenant = tenant_of(by_block[chosen][0])
            excess[tenant] = excess.get(tenant, 0) - 1
            self.forget(by_block[chosen])
            left.intersection_update(self.index.values())
            num_chosen += 1
            num_freed += len(cached) - len(set(cached) & set(self.index.values()))
        require(num_chosen <= needed <= num_freed, f"{what}: {num_chosen} evicted to free {num_freed}, {needed} were needed")
        self.num_evicted += num_freed
        left = [block for block in extra if block in self.index.values()]
        require(not left, f"{what}: {left} left the index for nothing")
        self.victims = []

    def _cached_keys(self, victims: set[int]) -> list[Key]:
        """Those that no sequence held before these were evicted."""
        cached = self.cached() | victims
        return [key for key, block in self.index.items() if block in cached]

    def quota(self) -> int:
        return int(self.config.tenant_quota * self.config.num_usable_blocks)

    def share_left(self, tenant: str) -> int:
        """What pins leave of a tenant's quota."""
        return self.quota() - len(
            {block for pin in self.pins.values() if tenant_of(pin.scope) == tenant for block in pin.blocks}
        )

    def over_quota(self, cached: Iterable[Key]) -> dict[str, list[Key]]:
        """The cached prefixes of tenants that have too many of them."""
        keys = list(cached) if self.config.tenant_quota < 1 else []
        owned = {tenant_of(scope): [key for key in keys if tenant_of(key[0]) == tenant_of(scope)] for scope, _ in keys}
        return {tenant: keys for tenant, keys in owned.items() if len(keys) > self.share_left(tenant)}

    def _next(
        self, blocks: list[int], leaves: list[int], by_block: dict[int, Key], ages: dict[int, int] | None = None
    ) -> list[int]:
        """The oldest of these, and of the leaves among them; a parent that went first took along what hung below it."""
        ages = self.ages if ages is None else ages
        oldest = sorted(_oldest(blocks, ages), key=lambda block: len(by_block[block][1]))
        return oldest + _oldest([block for block in leaves if block in blocks], ages)

    def _waits_longer_than_below(self, block: int, by_block: dict[int, Key]) -> bool:
        tenant, tokens = by_block[block]
        return any(
            key[0] == tenant and key[1][: len(tokens)] == tokens and self.ages.get(below, 0) > self.ages[block]
            for below, key in by_block.items()
        )

    # What clients know of reuse

    def heed(self, hint: ReuseHint | None) -> None:
        """From the first hint on, hints count."""
        if hint and self.children is None:
            self.children = {}

    def claim_blocks(self, q: NaiveSequence | None, blocks: Iterable[int]) -> None:
        """They are held by a pin, or by a sequence that may say NONE."""
        if q is None or q.hint is not ReuseHint.NONE:
            self.classes.update({block: max(self.classes.get(block, 0), 0) for block in blocks})

    def say(self, leaving: list[NaiveSequence]) -> None:
        """These sequences are about to give up their blocks, and what they say of reuse counts, once."""
        if self.children is not None:
            self.settle()
        for q in leaving if self.children is not None else ():
            if q.running and not q.has_said:
                keys = [self.key(q, idx) for idx in range(q.published)]
                self.hints.note_path(keys)
                counts = self.hints.note_end(tenant_of(q.scope), q.hint) or q.retain_seconds > 0
                self.note_hint(tenant_of(q.scope), keys, q.table[: q.published], q.hint, q.retain_seconds, counts=counts)

    def note_hint(
        self, tenant: str, keys: list[Key], path: list[int], hint: ReuseHint, seconds: float = 0, *, counts: bool = True
    ) -> None:
        """This is known of a prefix that is about to be given up."""
        assert self.children is not None
        if path and self.num_holders(path[-1]) == 1:
            self.hints.watch(keys[-1], hint, seconds if hint is ReuseHint.SOON else 0.0, self.now)
        if not counts or not self.hints.is_trusted(tenant, hint):
            if hint is ReuseHint.SOON:
                self._lapse_oldest(max(len(path), 1), tenant)
            hint = ReuseHint.UNSPECIFIED
        if hint is ReuseHint.SOON:
            level = 1 + (seconds > SOON_SECONDS[0]) + (seconds > SOON_SECONDS[1])
            self.classes.update({block: max(self.classes.get(block, 0), level) for block in path})
            return
        shared = [idx for idx, key in enumerate(keys) if self.children.get(key, 0) > 1]
        self.claim_blocks(None, path[: max(shared, default=-1) + 1] if hint is ReuseHint.NONE else path)
        for idx in range(len(path) - 1, -1, -1):
            if not self._leads_here_alone(keys, idx, path[idx]):
                break
            self.classes[path[idx]] = min(self.classes.get(path[idx], 0), -1 if hint is ReuseHint.NONE else 0)

    def _leads_here_alone(self, keys: list[Key], idx: int, block: int) -> bool:
        assert self.children is not None
        tenant, tokens = keys[idx]
        longer = len(tokens) + self.block_size
        below = {k for k in self.index if k[0] == tenant and len(k[1]) == longer and k[1][: len(tokens)] == tokens}
        below -= set(keys[idx + 1 : idx + 2])
        return not below and self.num_holders(block) == 1 and self.children.get(keys[idx], 0) < 2

    def _soon_by_tenant(self, blocks: Iterable[int]) -> dict[str, list[int]]:
        """Those of these blocks that are expected soon."""
        by_block = {block: key for key, block in self.index.items()}
        soon = [block for block in blocks if self.classes.get(block, 0) > 0]
        tenants = {one: tenant_of(by_block[one][0]) for one in soon}
        return {tenant: [each for each in soon if tenants[each] == tenant] for tenant in tenants.values()}

    def _bound_soon(self) -> None:
        """Too many that are expected soon: those that wait longest, of the tenant with most, are expected like others.

        Of tenants that have as many, the pool chooses whose block it is.
        """
        while True:
            soon = self._soon_by_tenant(block for block in self.ages if block not in self.victims)
            if sum(map(len, soon.values())) <= int(self.config.soon_share * self.config.num_usable_blocks):
                return
            most = max(map(len, soon.values()))
            of_most = [tenant for tenant, blocks in soon.items() if len(blocks) == most]
            self._lapse_oldest(1, max(of_most, key=lambda tenant: sum(self.class_of(block) < 1 for block in soon[tenant])))

    def _lapse_oldest(self, excess: int, tenant: str) -> None:
        """Among equals the pool chooses."""
        by_block = {block: key for key, block in self.index.items()}
        own = [block for block in self.ages if block not in self.victims and tenant_of(by_block[block][0]) == tenant]
        turns = {block: (self.classes[block], self.ages[block]) for block in own if self.classes.get(block, 0) > 0}
        soon = sorted(turns, key=turns.__getitem__)
        excess = min(excess, len(soon))
        if excess > 0:
            last = turns[soon[excess - 1]]
            surely = [block for block in soon if turns[block] < last]
            maybe = [block for block in soon if turns[block] == last]
            if len(maybe) > excess - len(surely):
                depths = {block: len(tokens) for (_, tokens), block in self.index.items()}
                maybe.sort(key=lambda block: (self.class_of(block), -depths[block]))  # a child goes before its parent
            for block in [*surely, *maybe][:excess]:
                self.classes[block], self.lapses[block] = 0, self.clock

    def lapse_soon(self, now: float) -> None:
        """What has been cached for the time of its class is no longer expected soon."""
        for block, age in self.ages.items():
            level = self.classes.get(block, 0)
            if level > 0 and int(self.times[age] * 1000) <= int((now - SOON_SECONDS[level - 1]) * 1000):
                self.classes[block], self.lapses[block] = 0, self.clock


def _oldest(blocks: list[int], ages: dict[int, int]) -> list[int]:
    first = min((ages[block] for block in blocks), default=0)
    return [block for block in blocks if ages[block] == first]


def _is_within(key: Key, above: Key) -> bool:
    return key[0] == above[0] and key[1][: len(above[1])] == above[1]
