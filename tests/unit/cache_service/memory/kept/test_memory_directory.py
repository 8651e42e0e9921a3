"""Files of kept memory: taken over where they are what a run has left, refused or cut where they are not."""

import errno
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import structlog

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.scopes import make_scope
from kvkeeper.cache_service.core.values.types import UNKNOWN_TENANT, Tier
from kvkeeper.cache_service.memory.kept import index_file, memory_directory
from kvkeeper.cache_service.memory.kept.description import Description
from kvkeeper.cache_service.memory.kept.kept_pool import BlockDigests, KeptPool
from kvkeeper.cache_service.memory.kept.memory_directory import MemoryDirectory, MemoryRefused, kept_bytes
from kvkeeper.cache_service.memory.private_file import FileRefused
from kvkeeper.common.service import memory_limit
from kvkeeper.common.service.memory_limit import OutOfMemory
from tests.support.worlds.memory_folder import SPEC, fill, memory_folder, taken_over

_PAGE = mmap.PAGESIZE


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


def file_of(folder: Path, suffix: str) -> Path:
    (path,) = folder.glob(f"pool-*.{suffix}")
    return path


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_a_pool_is_taken_over_with_its_memory_again_and_again(folder: Path) -> None:
    fill(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    for _ in range(3):
        index = taken_over(folder)
        assert index is not None and len(index) == 8
    directory = MemoryDirectory(folder, keep=True)
    (kept,) = directory.open_pools()
    assert kept.spec == SPEC
    blocks = kept.device.arena.blocks(16, SPEC.block_bytes)
    assert (blocks == np.arange(16, dtype=np.uint8)[:, None]).all(), "the null block is zero, all others are as they were"
    directory.close()


def test_a_pool_of_opaque_pages_is_taken_over(folder: Path) -> None:
    pages = KvSpec(b"pages", "model", 0, 0, 0, 0, 4, 48)
    directory = MemoryDirectory(folder, keep=True)
    kept = directory.make_pool(directory.allocate(16 * 48), pages, 16)
    kept.close()
    kept.device.arena.close()
    directory.close()
    directory = MemoryDirectory(folder, keep=True)
    (kept,) = directory.open_pools()
    assert (kept.spec, kept.spec.block_bytes) == (pages, 48)
    kept.close()
    kept.device.arena.close()
    directory.close()


@pytest.mark.parametrize(
    "counts",
    [
        (1, 1, 4, 4, 4, 48),
        (0, 0, 4, 0, 4, 48),
        (0, 0, 0, 0, 4, 0),
        (0, 0, 0, 0, 4, -48),
        (0, 0, 0, 0, 0, 48),
        (1, 0, 4, 4, 4, 0),
    ],
)
def test_a_description_has_elements_or_opaque_pages(counts: tuple[int, ...]) -> None:
    right = Description(1, 1, 2, 1024, KvSpec(b"pages", "model", 0, 0, 0, 0, 4, 48))
    assert Description.decode(right.encode()) == right
    wrong = Description(1, 1, 2, 1024, KvSpec(b"pages", "model", *counts))
    with pytest.raises(FileRefused, match="its description has"):
        Description.decode(wrong.encode())


def test_a_description_of_before_there_were_pages_is_read() -> None:
    old = Description(1, 1, 2, 1024, SPEC)
    fields = json.loads(old.encode())
    del fields["spec"]["page_bytes"]
    assert Description.decode(json.dumps(fields).encode()) == old


def test_a_folder_is_of_one_service_at_a_time(folder: Path) -> None:
    first = MemoryDirectory(folder, keep=True)
    with pytest.raises(MemoryRefused, match="another cache service keeps its memory there"):
        MemoryDirectory(folder, keep=True)
    first.close()
    MemoryDirectory(folder, keep=False).close()
    assert not folder.exists(), "without anything to keep, nothing is left"


def test_a_folder_on_a_disk_or_open_to_others_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(memory_directory, "IN_MEMORY", ("ramfs",))
        with pytest.raises(MemoryRefused, match=r"the folder lies on tmpfs, and the memory of pools needs"):
            MemoryDirectory(folder, keep=True)
    folder.chmod(0o750)
    with pytest.raises(MemoryRefused, match="must be yours with mode 0700"):
        MemoryDirectory(folder, keep=True)


def test_memory_is_refused_in_time_and_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = MemoryDirectory(folder, keep=True)
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: 4096)
    with pytest.raises(OutOfMemory):
        directory.allocate(1 << 20)
    monkeypatch.undo()
    with pytest.raises(OutOfMemory):
        directory.allocate(1 << 60)
    assert [path.name for path in folder.iterdir()] == ["lock"]
    directory.close()


def test_memory_that_was_reserved_and_not_used_is_found_again(folder: Path) -> None:
    directory = MemoryDirectory(folder, keep=True)
    for num_bytes in (8192, 8192, 8192, 4096):
        directory.allocate(num_bytes).close()
    directory.close()
    assert kept_bytes(folder) == 3 * (8192 + _PAGE) + 4096 + _PAGE
    directory = MemoryDirectory(folder, keep=True)
    spares, hosts = directory.open_spares((8192, 2), (4096, 0))
    assert [spare.num_bytes for spare in spares] == [8192, 8192] and not hosts
    assert len(list(folder.glob("spare-*"))) == 2, "what is too much, or of another size, goes"
    for spare in spares:
        directory.remove_arena(spare)
    directory.close()


def test_the_kernel_tells_whether_another_process_maps_the_memory(folder: Path) -> None:
    """The mapping alone counts: its maker has closed its descriptor, as a killed service has."""
    fill(folder)
    directory = MemoryDirectory(folder, keep=True)
    (old,) = directory.open_pools()
    given = os.dup(old.device.arena.descriptor)  # as the attach socket hands it over
    old.close()
    old.device.arena.close()
    mapping = mmap.mmap(given, 4096)
    os.close(given)
    directory.close()
    directory = MemoryDirectory(folder, keep=True)
    (new,) = directory.open_pools()
    own = mmap.mmap(os.dup(new.device.arena.descriptor), 4096)  # a process of this run: no other run's
    assert new.may_be_written()
    mapping.close()
    assert not new.may_be_written()
    own.close()
    directory.close()


Damage = Callable[[Path, Path], object]
_REFUSED: dict[str, Damage] = {
    "no arena": lambda index, arena: arena.unlink(),
    "no index": lambda index, arena: index.unlink(),
    "an index of no bytes": lambda index, arena: os.truncate(index, 0),
    "an index without its end": lambda index, arena: os.truncate(index, 5 * _PAGE),
    "an arena without its end": lambda index, arena: os.truncate(arena, arena.stat().st_size - 1),
    "an arena that is longer": lambda index, arena: os.truncate(arena, arena.stat().st_size + 1),
    "another magic": lambda index, arena: flip(index, 0),
    "another format": lambda index, arena: flip(index, 8),
    "a damaged length": lambda index, arena: flip(index, 12),
    "a damaged description": lambda index, arena: flip(index, 40),
    "a damaged number of runs": lambda index, arena: flip(index, 4 * _PAGE - 16),
    "a damaged stamp": lambda index, arena: flip(arena, arena.stat().st_size - _PAGE),
    "an index that others may read": lambda index, arena: index.chmod(0o644),
    "an arena that others may write": lambda index, arena: arena.chmod(0o622),
    "an index with another name": lambda index, arena: index.with_name("other").hardlink_to(index),
    "a copy of the arena": lambda index, arena: shutil.copy2(arena, arena.with_name("copy")).rename(arena),
    "a link in the place of the arena": lambda index, arena: arena.symlink_to(arena.rename(arena.with_name("moved"))),
    "a folder in the place of the arena": lambda index, arena: (arena.unlink(), arena.mkdir()),
}  # fmt: skip


@pytest.mark.parametrize("damage", _REFUSED)
def test_what_a_run_has_not_left_so_is_refused_and_removed(damage: str, folder: Path) -> None:
    fill(folder, tenants=("a", "b"))
    _REFUSED[damage](file_of(folder, "index"), file_of(folder, "arena"))
    assert taken_over(folder) is None
    assert not [path.name for path in folder.glob("pool-*") if not path.is_dir()]
    assert taken_over(folder) is None


def test_files_of_an_earlier_time_are_refused(folder: Path) -> None:
    fill(folder)
    index, arena = file_of(folder, "index"), file_of(folder, "arena")
    old_index, old_arena = index.read_bytes(), arena.read_bytes()
    assert taken_over(folder) is not None
    for path, old in ((index, old_index), (arena, old_arena)):
        now = path.read_bytes()
        path.write_bytes(old)
        copies = {file: file.read_bytes() for file in (index, arena)}
        assert taken_over(folder) is None
        for file, content in copies.items():
            file.write_bytes(content)
            file.chmod(0o600)
        path.write_bytes(now)


@pytest.mark.parametrize("damage", ["it is cut short", "a bit of it is another"])
def test_a_tenant_whose_name_is_damaged_loses_its_blocks_alone(damage: str, folder: Path) -> None:
    fill(folder, tenants=("a", "b"))
    index = file_of(folder, "index")
    last = index.stat().st_size - 1
    os.truncate(index, last) if damage == "it is cut short" else flip(index, last)
    for _ in range(2):
        with restored(folder) as (kept, manager):
            assert (manager.state.index.roots.scopes, len(manager.state.index)) == (["a"], 4)
            assert kept.device.index.num_nameless == 1
            assert (manager.state.allocator.last_tenants[5:] == UNKNOWN_TENANT).all()


def test_a_name_that_was_being_stored_is_cut_off(folder: Path) -> None:
    fill(folder, tenants=("a", "b"))
    index = file_of(folder, "index")
    num_bytes = index.stat().st_size
    with index.open("ab") as file:
        file.write(b"\5\0ab")
    found = taken_over(folder)
    assert found is not None and len(found) == 8 and len(found.roots) == 2
    assert index.stat().st_size == num_bytes


def no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(descriptor: int, data: bytes, at: int) -> int:
    """What a file system does that has room for a part."""
    return os.pwritev(descriptor, [data[: len(data) // 2]], at)


@contextmanager
def restored(folder: Path) -> Iterator[tuple[KeptPool, PoolManager]]:
    """The one pool of the folder, taken over by the next service until the block ends."""
    directory = MemoryDirectory(folder, keep=True)
    (kept,) = directory.open_pools()
    manager = PoolManager(PoolConfig(kept.device.num_blocks, SPEC.block_size))
    manager.restore(kept.kept(), may_still_write=False)
    assert not (wrong := manager.queries.check_invariants()), wrong
    try:
        yield kept, manager
    finally:
        kept.close()
        kept.device.arena.close()
        directory.close()


def publish(manager: PoolManager, tenant: str, first: int, num_blocks: int) -> None:
    """These blocks, with tokens of their own, as the tenant's; their rows are written."""
    index, blocks = manager.state.index, np.arange(first, first + num_blocks, dtype=np.int32)
    index.insert_run(index.root(tenant), np.repeat(blocks, SPEC.block_size) + 1000, blocks)
    while manager.record.write(1024):
        pass


@pytest.mark.parametrize("pwrite", [no_room, half_written])
@pytest.mark.parametrize("tenants", [(), ("",), ("a", "b")])
def test_a_tenant_whose_name_finds_no_room_loses_its_blocks_alone(
    folder: Path, tenants: tuple[str, ...], pwrite: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_cached = 8 if tenants else 0
    fill(folder, tenants=tenants, num_cached=num_cached)
    with restored(folder) as (_, manager), monkeypatch.context() as patch:
        patch.setattr(index_file.os, "pwrite", pwrite)
        publish(manager, "new", 9, 3)
    for _ in range(2):  # and it is not forgotten that other blocks may hold what it had
        with restored(folder) as (kept, manager):
            index = manager.state.index
            assert (index.roots.scopes, len(index), kept.device.index.num_nameless) == (list(tenants), num_cached, 1)
            assert (manager.state.allocator.last_tenants[9:] == UNKNOWN_TENANT).all()
    with restored(folder) as (_, manager):
        publish(manager, "another", 12, 2)  # it has the root that the nameless one had, and nothing of it
    with restored(folder) as (_, manager):
        index = manager.state.index
        assert (index.roots.scopes, len(index)) == ([*tenants, "another"], num_cached + 2)
        assert set(index.node_of_block.nonzero()[0].tolist()) == {*range(1, num_cached + 1), 12, 13}


def test_a_name_that_found_no_room_is_stored_once_there_is_some(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(folder)
    with restored(folder) as (kept, manager):
        with monkeypatch.context() as patch:
            patch.setattr(index_file.os, "pwrite", half_written)
            publish(manager, "new", 9, 3)
            kept.device.index.store_scopes()
            publish(manager, "newer", 12, 2)
            assert kept.device.index.num_unstored == 2
        kept.device.index.store_scopes()
        assert kept.device.index.num_unstored == 0
    with restored(folder) as (kept, manager):
        assert (manager.state.index.roots.scopes, len(manager.state.index)) == (["", "new", "newer"], 13)
        assert kept.device.index.num_nameless == 0


ONE, TWO, THREE = (make_scope("", "ad" * 32, salt) for salt in ("one", "two", "three"))


def places_below(manager: PoolManager, scope: str) -> list[int]:
    """The blocks behind a root, all of them one behind the other."""
    index, found = manager.state.index, list[int]()
    node = int(index.links.first_child[index.find_root(scope)]) if index.find_root(scope) else 0
    while node:
        found.append(int(index.block_of_node[node]))
        node = int(index.links.first_child[node])
    return found


def test_a_root_that_another_salt_has_taken_is_that_salts_after_a_kill(folder: Path) -> None:
    fill(folder, num_cached=6, tenants=("", ONE, TWO))
    with restored(folder) as (_, manager):
        assert [places_below(manager, scope) for scope in ("", ONE, TWO)] == [[1, 2], [3, 4], [5, 6]]
        manager.state.index.forget_blocks(np.array([3, 4], np.int32))
        publish(manager, THREE, 9, 3)
        assert manager.state.index.roots.scopes == ["", THREE, TWO]
    for _ in range(2):
        with restored(folder) as (kept, manager):
            assert [places_below(manager, scope) for scope in ("", ONE, TWO, THREE)] == [[1, 2], [], [5, 6], [9, 10, 11]]
            assert (manager.state.index.roots.scopes, kept.device.index.num_nameless) == (["", THREE, TWO], 0)


@pytest.mark.parametrize("pwrite", [no_room, half_written])
def test_a_root_whose_new_salt_cannot_be_stored_stays_as_it_is(
    folder: Path, pwrite: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(folder, num_cached=6, tenants=("", ONE, TWO))
    with restored(folder) as (_, manager), monkeypatch.context() as patch:
        manager.state.index.forget_blocks(np.array([3, 4], np.int32))
        patch.setattr(index_file.os, "pwrite", pwrite)
        publish(manager, THREE, 9, 3)
        assert manager.state.index.find_root(THREE) == -4
    for _ in range(2):
        with restored(folder) as (kept, manager):
            assert [places_below(manager, scope) for scope in ("", ONE, TWO, THREE)] == [[1, 2], [], [5, 6], []]
            assert kept.device.index.num_nameless == (1 if pwrite is no_room else 2)
            assert (manager.state.allocator.last_tenants[7:] == UNKNOWN_TENANT).all()


def test_a_damaged_record_in_the_middle_loses_its_blocks_alone(folder: Path) -> None:
    fill(folder, num_cached=6, tenants=("", ONE, TWO))
    index = file_of(folder, "index")
    content = index.read_bytes()
    flip(index, content.index(ONE.encode()))
    for _ in range(2):
        with restored(folder) as (kept, manager):
            assert [places_below(manager, scope) for scope in ("", ONE, TWO)] == [[1, 2], [], [5, 6]]
            assert (manager.state.index.roots.scopes, kept.device.index.num_nameless) == (["", None, TWO], 1)


def test_an_adapter_is_believed_where_the_record_of_its_tenant_is_damaged(folder: Path) -> None:
    scope = make_scope("b", "ad" * 32)
    fill(folder, num_cached=6, tenants=("a", "b", scope))
    index = file_of(folder, "index")
    flip(index, index.read_bytes().index(scope.encode()) - 512)
    with restored(folder) as (kept, manager):
        assert [places_below(manager, each) for each in ("a", "b", scope)] == [[1, 2], [], [5, 6]]
        assert (manager.state.index.roots.scopes, kept.device.index.num_nameless) == (["a", None, scope], 1)
        publish(manager, "b", 9, 2)
    with restored(folder) as (_, manager):
        assert [places_below(manager, each) for each in ("a", "b", scope)] == [[1, 2], [9, 10], [5, 6]]


def test_no_salt_is_in_the_files(folder: Path) -> None:
    fill(folder, tenants=("", make_scope("", "", "a secret of somebody")))
    assert b"a secret of somebody" not in b"".join(path.read_bytes() for path in folder.iterdir())


def test_a_foreign_file_is_let_be(folder: Path) -> None:
    fill(folder)
    (folder / "pool-of-mine.arena").write_bytes(b"x")
    assert taken_over(folder) is not None
    assert (folder / "pool-of-mine.arena").read_bytes() == b"x"


# The host tier


def host_file(folder: Path, suffix: str) -> Path:
    (path,) = folder.glob(f"host-*.{suffix}")
    return path


def test_a_host_tier_is_taken_over_with_its_pool_again_and_again(folder: Path) -> None:
    fill(folder, num_host_blocks=12)
    for _ in range(3):
        index = taken_over(folder)
        assert index is not None and len(index) == 8
        assert (np.count_nonzero(index.block_of_node), np.count_nonzero(index.host_of_node)) == (6, 4)


def test_the_kernel_tells_whether_another_process_maps_the_host_tier(folder: Path) -> None:
    fill(folder, num_host_blocks=12)
    directory = MemoryDirectory(folder, keep=True)
    (old,) = directory.open_pools()
    assert old.hosts is not None
    mapping = mmap.mmap(old.hosts.arena.descriptor, 4096)
    old.close()
    for tier in old.tiers:
        tier.arena.close()
    directory.close()
    directory = MemoryDirectory(folder, keep=True)
    (new,) = directory.open_pools()
    assert new.may_be_written()
    mapping.close()
    assert not new.may_be_written()
    directory.close()


def _other_folder(index: Path) -> None:
    """The host tier of another pool of this spec, with its arena."""
    with memory_folder() as other:
        fill(other, num_host_blocks=12)
        for suffix in ("index", "arena"):
            index.with_suffix(f".{suffix}").write_bytes(host_file(other, suffix).read_bytes())


_HOST_REFUSED: dict[str, Damage] = {
    **{name: damage for name, damage in _REFUSED.items() if "tenant" not in name and name != "no index"},
    "another pool's": lambda index, arena: _other_folder(index),
    "the pool's own index": lambda index, arena: shutil.copy2(index.with_name(index.name.replace("host", "pool")), index),
}


@pytest.mark.parametrize("damage", _HOST_REFUSED)
def test_a_damaged_host_tier_is_refused_and_removed_and_its_pool_is_not(damage: str, folder: Path) -> None:
    fill(folder, num_host_blocks=12)
    _HOST_REFUSED[damage](host_file(folder, "index"), host_file(folder, "arena"))
    index = taken_over(folder)
    assert index is not None and len(index) == 3, "the fourth block of the chain lay in the host tier alone"
    assert not [path for path in folder.glob("host-*") if not path.is_dir()]


def test_a_host_tier_of_an_earlier_time_is_refused(folder: Path) -> None:
    """All its files fit each other, and are of a time when the pool had other names."""
    fill(folder, num_host_blocks=12)
    paths = [host_file(folder, "index"), host_file(folder, "arena")]
    old = [path.read_bytes() for path in paths]
    assert taken_over(folder) is not None
    for path, content in zip(paths, old, strict=True):
        path.write_bytes(content)
    index = taken_over(folder)
    assert index is not None and len(index) == 3


def test_a_host_tier_whose_pool_is_refused_goes_with_it(folder: Path) -> None:
    fill(folder, num_host_blocks=12)
    flip(file_of(folder, "index"), 40)
    assert taken_over(folder) is None
    assert sorted(path.name for path in folder.iterdir()) == ["lock"]


def test_files_of_an_older_format_are_refused_with_a_log_line(folder: Path) -> None:
    fill(folder)
    with file_of(folder, "index").open("r+b") as file:
        file.seek(8)
        file.write((1).to_bytes(4, "little"))
    with structlog.testing.capture_logs() as logs:
        assert taken_over(folder) is None
    assert [(line["event"], line["why"]) for line in logs] == [("kept_memory_refused", "it has another format")]


# Digests


def test_a_digest_tells_each_changed_byte_of_a_block(folder: Path) -> None:
    fill(folder, num_host_blocks=12)
    directory = MemoryDirectory(folder, keep=True)
    (kept,) = directory.open_pools()
    digests, blocks = BlockDigests(kept), np.arange(1, 12, dtype=np.int32)
    for tier, files in zip((Tier.DEVICE, Tier.HOST), kept.tiers, strict=True):
        content = files.arena.blocks(files.num_blocks, SPEC.block_bytes)
        before = digests.of(tier, blocks)
        assert len(set(before.tolist())) == len(blocks) and before.all()
        for place in range(SPEC.block_bytes):
            content[5, place] ^= 1 << place % 8
            assert np.flatnonzero(digests.of(tier, blocks) != before).tolist() == [4]
            content[5, place] ^= 1 << place % 8
        assert (digests.of(tier, blocks) == before).all()
    assert (digests.of(Tier.DEVICE, blocks) != digests.of(Tier.HOST, blocks)).all(), "each file has its own key"
    directory.close()


@pytest.mark.parametrize("arena", ["pool", "host"])
def test_damage_of_an_arena_is_noticed_where_digests_are(arena: str, folder: Path) -> None:
    fill(folder, num_host_blocks=12, with_digests=True)
    (path,) = folder.glob(f"{arena}-*.arena")
    flip(path, 4 * SPEC.block_bytes)  # the fourth of the chain lies in the host tier alone
    unchecked = taken_over(folder)
    assert unchecked is not None and len(unchecked) == 8
    index = taken_over(folder, num_verified_blocks=0)
    assert index is not None and len(index) == (3 if arena == "host" else 8), "the device block of this number is no node's"
    flip(file_of(folder, "arena"), 3 * SPEC.block_bytes)
    index = taken_over(folder, num_verified_blocks=0)
    assert index is not None and len(index) == 2
