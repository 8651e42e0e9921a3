"""A whole KV cache on dicts and lists. Read this file first: the core does the same, fast and for many engines.

Owns blocks, block tables and the prefix index of one engine. It moves no bytes: it says which block holds which tokens, and the
engine reads and writes the memory. Start at TinyCache.step.

Rules: a block is free, held by tables, or cached (in the index, and held by no table). A held block may be in the index, too.
A block with another holder, the index included, is copied before it is written. A request that breaks the protocol fails an
assertion. A lack of blocks is an ordinary result. Imports nothing but the standard library.
`python -m kvkeeper.cache_service.tiny_cache` plays a short story. The tests of the scheduler run on this cache and on the core.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Sequence:
    """A list of tokens, and the blocks that hold their K and V: token i is in block table[i // block_size]."""

    tokens: list[int]
    max_tokens: int
    num_committed: int = 0  # tokens whose K and V are written: others may read them
    num_reserved: int = 0  # token slots granted: the engine may write them. 0 while the sequence waits for its start
    table: list[int] = field(default_factory=list)


class Commit(NamedTuple):
    """The K and V of the first num_tokens tokens are written. new_tokens follow the tokens that are known."""

    sequence_id: int
    num_tokens: int
    new_tokens: tuple[int, ...] = ()


class Fork(NamedTuple):
    """The child begins as the first num_tokens tokens of its parent, on the same blocks."""

    parent_id: int
    child_id: int
    num_tokens: int


class Start(NamedTuple):
    """A waiting sequence wants its cached prefix, of at most max_hit tokens, and slots for up to max_new tokens behind it."""

    sequence_id: int
    max_new: int
    max_hit: int


class Reserve(NamedTuple):
    """A running sequence wants slots for max_tokens tokens in all, and can do with min_tokens."""

    sequence_id: int
    min_tokens: int
    max_tokens: int


@dataclass
class Reply:
    """One entry for each start and reservation, and what changed in tables."""

    starts: list[int | None] = field(default_factory=list)  # tokens found in the cache; None: no room
    reserved: list[int] = field(default_factory=list)  # slots that the sequence now has in all; below min_tokens: no room
    new_blocks: list[tuple[int, int]] = field(default_factory=list)  # (index of the reservation, block): append it
    updates: list[tuple[int, int, int]] = field(default_factory=list)  # (sequence, table index, block): replace the entry
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination): to be made before the step's writes


class TinyCache:
    """The cache of one engine: num_blocks blocks of block_size tokens, of which block 0 is never granted."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.sequences: dict[int, Sequence] = {}
        self.free = list(range(1, num_blocks))
        self.num_tables = dict.fromkeys(self.free, 0)  # by block: how many tables name it
        self.index: dict[tuple[int, ...], int] = {}  # a prefix of whole blocks -> the block that holds its last tokens
        self.prefix_of: dict[int, tuple[int, ...]] = {}  # the same, by block
        self.cached: dict[int, None] = {}  # blocks that only the index holds, the least recently used first

    def create(self, sequence_id: int, tokens: list[int], max_tokens: int) -> None:
        """Takes a prompt in. It holds no block until a step starts it."""
        assert sequence_id not in self.sequences
        assert 0 < len(tokens) < max_tokens
        self.sequences[sequence_id] = Sequence(list(tokens), max_tokens)

    def step(
        self,
        commits: Iterable[Commit] = (),
        forks: Iterable[Fork] = (),
        releases: Iterable[int] = (),
        starts: Iterable[Start] = (),
        reserves: Iterable[Reserve] = (),
    ) -> Reply:
        """Applies one iteration of the engine: the protocol's Step. The most important item of a list comes first."""
        reply = Reply()
        for commit in commits:
            self.commit(commit, reply)
        for fork in forks:
            self.fork(fork)
        for sequence_id in releases:
            self.release(sequence_id)
        for start in starts:
            reply.starts.append(self.start(start))
        has_room = True  # after a refused reservation later ones get no block: small ones must not overtake it for ever
        for item, reserve in enumerate(reserves):
            has_room = self.reserve(item, reserve, reply, may_take=has_room)
        return reply

    def commit(self, commit: Commit, reply: Reply) -> None:
        """Full blocks of committed tokens enter the index: from now on another sequence may find them."""
        sequence = self.sequences[commit.sequence_id]
        sequence.tokens += commit.new_tokens
        assert len(sequence.tokens) <= sequence.max_tokens
        assert sequence.num_committed <= commit.num_tokens <= min(len(sequence.tokens), sequence.num_reserved)
        first_idx, sequence.num_committed = sequence.num_committed // self.block_size, commit.num_tokens
        for table_idx in range(first_idx, commit.num_tokens // self.block_size):
            prefix = tuple(sequence.tokens[: (table_idx + 1) * self.block_size])
            block = sequence.table[table_idx]
            known = self.index.setdefault(prefix, block)
            self.prefix_of[known] = prefix
            if known != block:  # another sequence computed the same: one block of it is enough
                sequence.table[table_idx] = self.hold(known)
                self.drop([block])
                reply.updates.append((commit.sequence_id, table_idx, known))

    def fork(self, fork: Fork) -> None:
        """Copies a table, and no K or V."""
        parent = self.sequences[fork.parent_id]
        assert fork.child_id not in self.sequences
        assert 0 < fork.num_tokens <= parent.num_committed
        table = [self.hold(block) for block in parent.table[: self.num_blocks(fork.num_tokens)]]
        tokens = parent.tokens[: fork.num_tokens]
        self.sequences[fork.child_id] = Sequence(tokens, parent.max_tokens, fork.num_tokens, fork.num_tokens, table)

    def release(self, sequence_id: int) -> None:
        """The sequence ends. Its blocks stay cached where the index has them."""
        self.drop(self.sequences.pop(sequence_id).table)

    def start(self, start: Start) -> int | None:
        """Looks the prompt up, holds what was found, and reserves the first slots: one decision. Returns the hit, in tokens."""
        sequence = self.sequences[start.sequence_id]
        assert not sequence.table
        hit = list(self.find(sequence.tokens, min(start.max_hit, len(sequence.tokens) - 1)))  # one is left to compute
        num_hit = len(hit) * self.block_size
        table = [self.hold(block) for block in hit]  # first, so that they are not evicted for the others
        for num_tokens in range(min(len(sequence.tokens), num_hit + start.max_new), num_hit, -1):
            new = self.take(self.num_blocks(num_tokens) - len(hit))
            if new is not None:
                sequence.table, sequence.num_committed, sequence.num_reserved = table + new, num_hit, num_tokens
                return num_hit
        self.drop(table)
        return None

    def reserve(self, item: int, reserve: Reserve, reply: Reply, *, may_take: bool) -> bool:
        """Grants the largest length that fits. Returns whether later reservations may take blocks."""
        sequence = self.sequences[reserve.sequence_id]
        assert sequence.table
        assert reserve.min_tokens <= reserve.max_tokens <= sequence.max_tokens
        first_idx = sequence.num_committed // self.block_size  # where the engine writes next
        is_shared = first_idx < len(sequence.table) and self.num_holders(sequence.table[first_idx]) > 1
        for num_tokens in range(reserve.max_tokens, reserve.min_tokens - 1, -1):
            num_more = max(0, self.num_blocks(num_tokens) - len(sequence.table)) + is_shared
            blocks = self.take(num_more) if may_take or not num_more else None
            if blocks is None:
                continue
            if is_shared:
                self.copy_on_write(reserve.sequence_id, first_idx, blocks.pop(), reply)
            sequence.table += blocks
            reply.new_blocks += [(item, block) for block in blocks]
            sequence.num_reserved = max(sequence.num_reserved, num_tokens)
            reply.reserved.append(sequence.num_reserved)
            return may_take
        reply.reserved.append(min(sequence.num_reserved, reserve.min_tokens - 1))
        return False

    def copy_on_write(self, sequence_id: int, table_idx: int, copy: int, reply: Reply) -> None:
        """Puts a copy in the place of a shared block, so that a write reaches no other holder."""
        table = self.sequences[sequence_id].table
        reply.copies.append((table[table_idx], copy))
        reply.updates.append((sequence_id, table_idx, copy))
        self.drop([table[table_idx]])
        table[table_idx] = copy

    def find(self, tokens: list[int], max_tokens: int) -> Iterator[int]:
        """The blocks of the longest cached prefix of whole blocks."""
        for end in range(self.block_size, max_tokens + 1, self.block_size):
            block = self.index.get(tuple(tokens[:end]))
            if block is None:
                return
            yield block

    def take(self, count: int) -> list[int] | None:
        """Blocks for new tokens: free ones first, then evicted ones. Returns None where there are too few, and evicts none."""
        if count > len(self.free) + len(self.cached):
            return None
        while len(self.free) < count:
            self.evict(next(iter(self.cached)))
        blocks, self.free = self.free[:count], self.free[count:]
        return [self.hold(block) for block in blocks]

    def evict(self, block: int) -> None:
        """Forgets what a cached block holds."""
        del self.cached[block], self.index[self.prefix_of.pop(block)]
        self.free.append(block)

    def hold(self, block: int) -> int:
        """One more table names the block."""
        self.cached.pop(block, None)
        self.num_tables[block] += 1
        return block

    def drop(self, blocks: list[int]) -> None:
        """A table names these blocks no more. The last ones go first: a prefix is of use without what follows it."""
        for block in reversed(blocks):
            self.num_tables[block] -= 1
            if self.num_tables[block] == 0:
                if block in self.prefix_of:
                    self.cached[block] = None
                else:
                    self.free.append(block)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_holders(self, block: int) -> int:
        return self.num_tables[block] + (block in self.prefix_of)

    def check(self) -> None:
        """Recomputes what is kept in two places. Rules R1, R2 and R5 of the documents."""
        tables = [sequence.table for sequence in self.sequences.values()]
        assert self.num_tables == {block: sum(block in table for table in tables) for block in self.num_tables}
        assert self.prefix_of == {block: prefix for prefix, block in self.index.items()}
        unnamed = {block for block, count in self.num_tables.items() if not count}
        assert sorted([*self.free, *self.cached]) == sorted(unnamed), "a block is lost, or in two states"
        assert set(self.cached) == unnamed & self.prefix_of.keys()
        assert all(len(each.table) == self.num_blocks(each.num_reserved) for each in self.sequences.values())


def story() -> Iterator[tuple[str, TinyCache]]:
    """A fork, a copy, a hit and an eviction in 6 blocks of 4 tokens. Yields what happened, and the cache after it."""
    cache = TinyCache(num_blocks=7, block_size=4)
    cache.create(1, [1, 2, 3, 4, 5, 6], max_tokens=16)
    cache.step(starts=[Start(1, max_new=6, max_hit=6)])
    yield "Sequence 1 starts. Its 6 tokens have slots in 2 new blocks.", cache
    cache.step(commits=[Commit(1, 6, (7,))], forks=[Fork(1, 2, 6)])
    yield "It commits them, and token 7 follows. Full block 1 enters the index. A fork of 6 tokens shares both blocks.", cache
    reply = cache.step(commits=[Commit(2, 6, (8,))], reserves=[Reserve(1, 7, 7), Reserve(2, 7, 7)])
    yield f"Both write their 7th token next. Block 2 is shared, so it is copied first: {reply.copies}.", cache
    cache.step(releases=[1, 2])
    yield "Both end. Block 1 stays cached.", cache
    cache.create(3, [1, 2, 3, 4, 9], max_tokens=16)
    reply = cache.step(starts=[Start(3, max_new=8, max_hit=8)])
    yield f"Sequence 3 begins as sequence 1 did: {reply.starts[0]} of its 5 tokens are in the cache.", cache
    cache.create(4, list(range(20, 43)), max_tokens=24)
    cache.step(releases=[3], starts=[Start(4, max_new=23, max_hit=23)])
    yield "Sequence 3 ends, and sequence 4 needs all 6 blocks: block 1 is evicted.", cache


def main() -> None:
    for text, cache in story():
        cache.check()
        print(text)
        for name, each in cache.sequences.items():
            print(f"    sequence {name}: tokens {each.tokens}, of which {each.num_committed} committed, table {each.table}")
        print(f"    index {cache.index}, cached {list(cache.cached)}, free {cache.free}")


if __name__ == "__main__":
    main()
