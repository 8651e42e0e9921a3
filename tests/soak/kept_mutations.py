"""Row 22: files of kept memory that were damaged, cut, mixed or swapped are refused or cut, and never believed.

Each mutation starts from files that a killed service has left, of a pool and of its host tier, with blocks that hold their own
numbers. The oracle is the index that was: what is believed of damaged files is a part of it, each prefix in its own block of
each tier, every such block holds what it held, and the audit finds nothing wrong.
"""

import mmap
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.values.kept_index import row_words
from tests.soak.row import Counts
from tests.support.worlds.memory_folder import SPEC, fill, memory_folder, taken_over

_NUM_MUTATIONS = 250  # of one unit
_NUM_BLOCKS, _NUM_CACHED = 24, 16
_HEADER, _PAGE = 4 * mmap.PAGESIZE, mmap.PAGESIZE
_ROW = 4 * row_words(SPEC.block_size)

_TENANTS = ("", "b", "c")
_TIERS = ("pool", "host")
_ARENA_DAMAGE = "bytes of blocks"  # in the arena; of all others it is the index that is damaged

Prefix = tuple[str, tuple[int, ...]]
Places = tuple[int, int]  # device block and host block, 0 for none
Mutation = Callable[[random.Random, bytearray], None]


@dataclass(slots=True)
class Files:
    """What a killed service has left, by tier, and what is believed of it."""

    index: dict[str, bytes]
    arena: dict[str, bytes]
    prefixes: dict[Prefix, Places]


def run(seed: int) -> Counts:
    """Counts mutations; the fault is one after which less is believed than before."""
    rng, num_noticed = random.Random(seed), 0
    with memory_folder() as folder:
        files, others = _files(folder, seed), _files(folder, seed + 1)
        for number in range(_NUM_MUTATIONS):
            shutil.rmtree(folder, ignore_errors=True)
            _fill(folder, seed)
            name, tier = rng.choice(sorted(_MUTATIONS)), rng.choice(_TIERS)
            (index_path,) = folder.glob(f"{tier}-*.index")
            arena_path = index_path.with_suffix(".arena")
            path = arena_path if name == _ARENA_DAMAGE else index_path
            content = bytearray(path.read_bytes())
            before = bytes(content)
            if name == "rows of another file":
                _mix(rng, content, others.index[tier])
            elif name == "rows of the other tier":
                _mix(rng, content, next(folder.glob(f"{_TIERS[tier == 'pool']}-*.index")).read_bytes())
            elif name == "another arena":
                arena_path.write_bytes(files.arena[tier])
            else:
                _MUTATIONS[name](rng, content)
            with path.open("r+b") as file:
                file.truncate(len(content))
                file.write(content)
            try:
                num_noticed += _check(folder, files.prefixes, is_changed=bytes(content) != before or name == "another arena")
            except BaseException as error:
                error.add_note(f"mutation {number} of seed {seed}: {name} of the {tier}")
                raise
    return Counts(_NUM_MUTATIONS, num_noticed)


def _check(folder: Path, prefixes: dict[Prefix, Places], *, is_changed: bool) -> bool:
    """Whether the damage was noticed."""
    index = taken_over(folder, num_verified_blocks=0)
    if index is None:
        return is_changed
    found = _prefixes(index)
    for prefix, places in found.items():
        assert prefix in prefixes, "something is believed that no run has written"
        assert all(place in (0, was) for place, was in zip(places, prefixes[prefix], strict=True)), "in another block"
    for tier, first, places in zip(_TIERS, (0, 100), zip(*found.values(), strict=True), strict=False):
        for arena_path in folder.glob(f"{tier}-*.arena"):
            content = np.frombuffer(arena_path.read_bytes(), np.uint8)[: _NUM_BLOCKS * SPEC.block_bytes]
            blocks = np.array([place for place in places if place], np.int64)
            held = content.reshape(_NUM_BLOCKS, -1)[blocks]
            assert (held == first + blocks[:, None]).all(), "what is believed is not what was written"
    assert is_changed or found == prefixes
    return found != prefixes


def _fill(folder: Path, seed: int) -> None:
    sizes = {"num_blocks": _NUM_BLOCKS, "num_cached": _NUM_CACHED, "num_host_blocks": _NUM_BLOCKS}
    fill(folder, **sizes, tenants=_TENANTS, with_digests=True, seed=seed)


def _files(folder: Path, seed: int) -> Files:
    _fill(folder, seed)
    index, arena = (
        {tier: next(folder.glob(f"{tier}-*.{suffix}")).read_bytes() for tier in _TIERS} for suffix in ("index", "arena")
    )
    found = taken_over(folder, num_verified_blocks=0)
    assert found is not None and len(found) == _NUM_CACHED
    shutil.rmtree(folder)
    return Files(index, arena, _prefixes(found))


def _prefixes(index: PrefixIndex) -> dict[Prefix, Places]:
    """The blocks of each cached prefix."""
    found: dict[Prefix, Places] = {}
    for tenant in _TENANTS:
        node, tokens = int(index.links.first_child[index.find_root(tenant)]) if index.find_root(tenant) else 0, ()
        while node:
            tokens = (*tokens, *index.key_tokens(node)[1].tolist())
            found[tenant, tokens] = int(index.block_of_node[node]), int(index.host_of_node[node])
            node = int(index.links.first_child[node])
    return found


def _mix(rng: random.Random, index: bytearray, other: bytes) -> None:
    """Checks and rows of a table of other tokens, under this file's header."""
    block = rng.randrange(1, _NUM_CACHED + 1)
    for place, length in ((_HEADER + 8 * block, 8), (_HEADER + _PAGE + _ROW * block, _ROW)):
        index[place : place + length] = other[place : place + length]


def _flip_bits(rng: random.Random, index: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        index[rng.randrange(len(index))] ^= 1 << rng.randrange(8)


def _flip_table(rng: random.Random, index: bytearray) -> None:
    start, row = rng.choice([(_HEADER, 8), (_HEADER + _PAGE, _ROW)])
    index[start + rng.randrange(row, row * (_NUM_CACHED + 1))] ^= 1 << rng.randrange(8)


def _tear_row(rng: random.Random, index: bytearray) -> None:
    """A row that is half one block's and half another's."""
    first, second = (_HEADER + _PAGE + _ROW * rng.randrange(1, _NUM_CACHED + 1) for _ in range(2))
    cut = 4 * rng.randrange(1, _ROW // 4)
    index[first : first + cut] = index[second : second + cut]


def _move_row(rng: random.Random, index: bytearray) -> None:
    """A row with its check in the place of another block."""
    source, destination = rng.randrange(1, _NUM_CACHED + 1), rng.randrange(_NUM_BLOCKS)
    for start, length in ((_HEADER, 8), (_HEADER + _PAGE, _ROW)):
        row = index[start + length * source : start + length * (source + 1)]
        index[start + length * destination : start + length * (destination + 1)] = row


def _forge_check(rng: random.Random, index: bytearray) -> None:
    place = _HEADER + 8 * rng.randrange(_NUM_BLOCKS)
    index[place : place + 8] = rng.randbytes(8)


def _forge_row(rng: random.Random, index: bytearray) -> None:
    """Numbers as a program would write them, with an old check."""
    block, words = rng.randrange(1, _NUM_CACHED + 1), np.zeros(row_words(SPEC.block_size), np.int32)
    words[0], words[row_words(0) :] = rng.randrange(1, 40), [rng.randrange(100) for _ in range(SPEC.block_size)]
    words[2:4] = rng.choice([(-1, -1), (rng.randrange(1, 40), 0)])
    index[_HEADER + _PAGE + _ROW * block : _HEADER + _PAGE + _ROW * (block + 1)] = words.tobytes()


def _truncate(rng: random.Random, index: bytearray) -> None:
    del index[rng.randrange(len(index)) :]


def _append(rng: random.Random, index: bytearray) -> None:
    index += rng.randbytes(rng.randrange(1, 100))


def _zero(rng: random.Random, index: bytearray) -> None:
    start = rng.randrange(len(index))
    end = min(len(index), start + rng.choice([1, 16, _PAGE, 4 * _PAGE]))
    index[start:end] = bytes(end - start)


def _damage_blocks(rng: random.Random, arena: bytearray) -> None:
    """In the memory itself, which has no other check than the digests."""
    for _ in range(rng.choice([1, 1, 8])):
        arena[rng.randrange(SPEC.block_bytes, SPEC.block_bytes * _NUM_BLOCKS)] ^= 1 << rng.randrange(8)


def _damage_names(rng: random.Random, index: bytearray) -> None:
    index[rng.randrange(len(index) - 20, len(index))] ^= 1 << rng.randrange(8)


def _damage_header(rng: random.Random, index: bytearray) -> None:
    index[rng.randrange(600)] ^= 1 << rng.randrange(8)


_MUTATIONS: dict[str, Mutation | None] = {
    "bits": _flip_bits,
    "bits of the table": _flip_table,
    "a torn row": _tear_row,
    "a moved row": _move_row,
    "a forged check": _forge_check,
    "a forged row": _forge_row,
    "cut": _truncate,
    "longer": _append,
    "zeros": _zero,
    "tenants' names": _damage_names,
    "header": _damage_header,
    "rows of another file": None,
    "rows of the other tier": None,
    "another arena": None,
    _ARENA_DAMAGE: _damage_blocks,
}
