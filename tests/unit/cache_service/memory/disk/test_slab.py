"""A slab on a real disk: whatever happens to its file, no block comes back that is not the one that was stored."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvkeeper.cache_service.core.values.copies import NAME_BYTES, TierOrder, TierResult
from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.cache_service.memory.arena import ByteArray
from kvkeeper.cache_service.memory.disk.slab import Slab, make_slab, rows_path
from kvkeeper.cache_service.memory.disk.slab_form import PAGE, fit_form
from kvkeeper.cache_service.memory.private_file import FileRefused, make_file
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena

WHOLE = KvSpec(b"whole pages", "model", 2, 4, 32, 4, 4)  # blocks of 8 KiB
ODD = KvSpec(b"odd", "model", 1, 1, 5, 4, 4)  # blocks of 160 bytes
NUM_BYTES, NUM_HOSTS = 1 << 20, 64


@pytest.fixture(params=[WHOLE, ODD], ids=["whole-pages", "odd"])
def spec(request: pytest.FixtureRequest) -> KvSpec:
    found: KvSpec = request.param
    return found


@pytest.fixture
def slab(spec: KvSpec, tmp_path: Path) -> Iterator[Slab]:
    path = tmp_path / "slab.kv"
    os.close(make_file(tmp_path / "spare", NUM_BYTES))
    make_slab(tmp_path / "spare", path, spec, NUM_BYTES)
    made = Slab(path, spec, NUM_BYTES)
    yield made
    made.close()


@pytest.fixture
def hosts(spec: KvSpec) -> Iterator[ByteArray]:
    """[NUM_HOSTS, block bytes], each its own noise."""
    arena = SharedMemoryArena(NUM_HOSTS * spec.block_bytes)
    arena.array[:] = np.random.default_rng(1).integers(0, 256, len(arena.array), np.uint8)
    yield arena.blocks(NUM_HOSTS, spec.block_bytes)
    arena.close()


def order(number: int, *, slot: int, host: int, era: int = 1) -> TierOrder:
    """Content of this number, which is its name and its tokens."""
    return TierOrder(slot, host, number.to_bytes(NAME_BYTES), (number - 1).to_bytes(NAME_BYTES), bytes(range(16)), number, era)


def stored(slab: Slab, hosts: ByteArray, count: int) -> list[TierOrder]:
    """Stores host blocks 1 to count in slots 1 to count."""
    orders = [order(number, slot=number, host=number) for number in range(1, count + 1)]
    assert slab.write(orders, hosts) == [TierResult.DONE] * count
    return orders


def elsewhere(orders: list[TierOrder]) -> list[TierOrder]:
    """The same blocks, to be read behind those that they were stored from."""
    return [each._replace(host=each.host + len(orders)) for each in orders]


def test_blocks_come_back_as_they_were_stored(slab: Slab, hosts: ByteArray) -> None:
    orders = stored(slab, hosts, 9)
    back = elsewhere(orders)
    assert slab.read(back[::2] + back[1::2], hosts) == [TierResult.DONE] * 9
    assert np.array_equal(hosts[10:19], hosts[1:10])
    assert [(block.slot, block.number) for block in slab.scan()] == [(number, number) for number in range(1, 10)]


def test_the_next_run_finds_what_was_stored(slab: Slab, spec: KvSpec, hosts: ByteArray) -> None:
    orders = stored(slab, hosts, 5)
    again = Slab(slab.path, spec, NUM_BYTES)
    assert [block.name for block in again.scan()] == [each.name for each in orders]
    assert again.name_key == slab.name_key
    assert again.read(elsewhere(orders), hosts) == [TierResult.DONE] * 5
    again.close()


def test_a_slot_is_read_only_as_what_was_stored_there(slab: Slab, hosts: ByteArray) -> None:
    (first, second) = stored(slab, hosts, 2)
    for wrong in (
        first._replace(slot=2),
        first._replace(name=second.name),
        first._replace(parent=second.parent),
        first._replace(tokens=bytes(16)),
        first._replace(era=2),
        first._replace(slot=7),
    ):
        assert slab.read([wrong._replace(host=9)], hosts) == [TierResult.DAMAGED], wrong
        stored(slab, hosts, 2)
    assert slab.read([first._replace(host=9)], hosts) == [TierResult.DONE]


def test_of_ten_thousand_damaged_slots_each_is_found_and_none_is_believed_again(slab: Slab, hosts: ByteArray) -> None:
    rng, form = random.Random(5), slab.form
    count, damages = 20, {"flip": 0, "tear": 0, "swap": 0, "row": 0, "row swap": 0, "zeros": 0}
    descriptor, rows = os.open(slab.path, os.O_RDWR), os.open(rows_path(slab.path), os.O_RDWR)
    orders = stored(slab, hosts, count)
    back = elsewhere(orders)
    for _ in range(10_000):
        at = rng.randrange(count)
        slot, other = at + 1, (at + 1 + rng.randrange(count - 1)) % count + 1
        kind = rng.choice(list(damages))
        damages[kind] += 1
        if kind == "flip":
            _flip(descriptor, form.slot_at(slot) + rng.randrange(form.block_bytes), rng)
        elif kind == "tear":
            half = os.pread(descriptor, form.block_bytes // 2, form.slot_at(other))
            os.pwrite(descriptor, half, form.slot_at(slot))
        elif kind == "zeros":
            os.pwrite(descriptor, bytes(form.block_bytes), form.slot_at(slot))
        elif kind == "swap":
            os.pwrite(descriptor, os.pread(descriptor, form.block_bytes, form.slot_at(other)), form.slot_at(slot))
        elif kind == "row":
            _flip(rows, form.row_at(slot) + rng.randrange(form.row_bytes), rng)
        else:
            os.pwrite(rows, os.pread(rows, form.row_bytes, form.row_at(other)), form.row_at(slot))
        assert slab.read([back[at]], hosts) == [TierResult.DAMAGED], kind
        if not rng.randrange(100):
            assert slot not in {block.slot for block in slab.scan()}, kind
        assert slab.write([orders[at]], hosts) == [TierResult.DONE]
    assert slab.read(back, hosts) == [TierResult.DONE] * count
    assert min(damages.values()) > 1_000
    os.close(descriptor)
    os.close(rows)


def _flip(descriptor: int, at: int, rng: random.Random) -> None:
    (byte,) = os.pread(descriptor, 1, at)
    os.pwrite(descriptor, bytes([byte ^ (1 << rng.randrange(8))]), at)


class _Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize(("call", "number"), [("pwritev", 1), ("pwrite", 2)], ids=["at the bytes", "at the row"])
def test_a_store_that_was_cut_off_leaves_no_block(
    slab: Slab, hosts: ByteArray, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    (first, *_) = stored(slab, hosts, 2)
    real, calls = getattr(os, call), list[object]()

    def cut(*args: object) -> object:
        calls.append(args)
        if len(calls) == number:
            raise _Killed
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, cut)
        with pytest.raises(_Killed):
            slab.write([first._replace(host=5, number=9)], hosts)
    assert 1 not in {block.slot for block in slab.scan()}
    assert slab.read([first._replace(host=9)], hosts) == [TierResult.DAMAGED]


def test_errors_and_short_calls_of_the_disk_are_failures(slab: Slab, hosts: ByteArray, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = stored(slab, hosts, 3)

    def eio(*_: object) -> int:
        raise OSError(5, "a test")

    for call, act in (("preadv", slab.read), ("pwritev", slab.write)):
        for fails in (eio, lambda *_: 0):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, fails)
                assert act(elsewhere(orders), hosts) == [TierResult.FAILED] * 3
        stored(slab, hosts, 3)
    real = os.preadv

    def one_page(descriptor: int, buffers: list[memoryview], at: int) -> int:
        return real(descriptor, [buffers[0][:PAGE]], at)

    monkeypatch.setattr(os, "preadv", one_page)
    assert slab.read(elsewhere(orders), hosts) == [TierResult.DONE] * 3
    assert np.array_equal(hosts[4:7], hosts[1:4])


def test_a_file_that_was_cut_short_or_deleted_gives_no_wrong_block(slab: Slab, spec: KvSpec, hosts: ByteArray) -> None:
    orders = stored(slab, hosts, 6)
    slab.path.unlink()
    assert slab.read(elsewhere(orders), hosts) == [TierResult.DONE] * 6  # it is there as long as it is open
    os.truncate(f"/proc/self/fd/{slab._data}", slab.form.slot_at(3))
    results = slab.read([orders[number] for number in (0, 2, 4)], hosts)
    assert results == [TierResult.DONE, TierResult.FAILED, TierResult.FAILED]
    with pytest.raises(FileRefused):
        Slab(slab.path, spec, NUM_BYTES)


def test_an_era_ends_what_was_stored_before(slab: Slab, spec: KvSpec, hosts: ByteArray) -> None:
    stored(slab, hosts, 3)
    slab.write_era(2)
    slab.write([order(7, slot=2, host=2, era=2)], hosts)
    again = Slab(slab.path, spec, NUM_BYTES)
    assert [block.slot for block in again.scan()] == [2]
    again.close()


@pytest.mark.parametrize(
    "harm", ["version", "spec", "size", "rows size", "link", "rows link", "two names", "mode", "header", "hole"]
)
def test_a_file_that_is_not_this_slab_is_refused(slab: Slab, spec: KvSpec, hosts: ByteArray, tmp_path: Path, harm: str) -> None:
    stored(slab, hosts, 2)
    path, rows = slab.path, rows_path(slab.path)
    Slab(path, spec, NUM_BYTES).close()  # it is one, until then
    if harm == "version":
        with rows.open("r+b") as file:
            file.write(b"kvkeeper disk 1\n")
    elif harm == "spec":
        spec = replace(spec, key=b"another revision")
    elif harm in ("size", "rows size"):
        os.truncate(path if harm == "size" else rows, NUM_BYTES + PAGE)
    elif harm in ("link", "rows link"):
        linked = path if harm == "link" else rows
        linked.rename(tmp_path / "other")
        linked.symlink_to(tmp_path / "other")
    elif harm == "two names":
        os.link(path, tmp_path / "other")
    elif harm == "mode":
        path.chmod(0o644)
    elif harm == "header":
        with rows.open("r+b") as file:
            file.seek(20)
            file.write(b"forged")
    else:
        rows.write_bytes(bytes(rows.stat().st_size))
    with pytest.raises(FileRefused):
        Slab(path, spec, NUM_BYTES)


def test_a_slab_fits_its_size() -> None:
    for block_bytes in (1, 4095, 4096, 4097, 2 << 20):
        for num_bytes in (PAGE, 1 << 20, 5 << 20):
            form = fit_form(num_bytes, replace(WHOLE, page_bytes=block_bytes))
            assert form.num_slots == 0 or form.slot_at(form.num_slots + 1) + form.rows_bytes <= num_bytes
