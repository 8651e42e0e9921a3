"""Part a: the behaviour of CUDA memory shared between processes, case by case; each case in processes of its own.

IPC handles here, memory that is shared by descriptors in vmm.py; a rehearsal runs the former on files.

The findings decide what the design may rely on: that an arena outlives its makers, that a killed engine's kernels stop, that a
stale handle opens nothing.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.gpu import vmm
from tests.gpu.checks import Check
from tests.gpu.peer import Peer, PeerFailed

_SIZE = 8 << 20
_QUIET_S = 0.2  # without a change: all writers have stopped
_LONGEST_S = 10.0
_LARGE = (1 << 30, 16 << 30, 64 << 30)


class Peers:
    """Makes peers that end with it. folder: of the rehearsal's device memory; None: a real device."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> Peer:
        """Another process."""
        return self._stack.enter_context(Peer(self._folder))

    @property
    def is_rehearsal(self) -> bool:
        return self._folder is not None


def run(is_dry: bool) -> Iterator[Check]:
    """All cases. One that fails in an unexpected way is a failed check, and the others go on."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _matrix(Path(folder) if is_dry else None)
    yield from vmm.run(is_dry)


def _matrix(folder: Path | None) -> Iterator[Check]:
    cases: list[Callable[[Peers], Check]] = [
        _both_ways,
        _two_importers,
        _same_process,
        _open_twice,
        _exporter_killed,
        _importer_killed,
        _stale_handle,
        _reused_address,
        _context_cost,
    ]
    for case in cases:
        yield _guarded(case, folder)
    for num_bytes in (1 << 20,) if folder is not None else _LARGE:
        yield _guarded(partial(_large, num_bytes=num_bytes), folder, f"ipc_{num_bytes >> 20}_mib")


def _guarded(case: Callable[[Peers], Check], folder: Path | None, name: str = "") -> Check:
    try:
        with Peers(folder) as peers:
            return case(peers)
    except (PeerFailed, OSError, ValueError) as error:
        return Check(name or f"ipc{case.__name__}", False, note=str(error))


def _shared(exporter: Peer, num_bytes: int = _SIZE) -> tuple[int, str, int]:
    """An allocation's pointer in its process, handle and offset."""
    pointer = exporter.call("allocate", num_bytes=num_bytes)
    handle, offset = exporter.call("export", pointer=pointer)
    return pointer, handle, offset


def _both_ways(peers: Peers) -> Check:
    exporter, importer = peers.start(), peers.start()
    pointer, handle, offset = _shared(exporter)
    began = time.perf_counter()
    base = importer.call("open", handle=handle)
    open_ms = (time.perf_counter() - began) * 1000
    exporter.call("write", pointer=pointer, data="01020304")
    seen = importer.call("read", pointer=base + offset, num_bytes=5)
    importer.call("write", pointer=base + offset + _SIZE - 1, data="09")
    back = exporter.call("read", pointer=pointer + _SIZE - 1, num_bytes=1)
    return Check("ipc_both_ways", seen == "0102030400" and back == "09", {"open_ms": open_ms, "offset_bytes": offset})


def _two_importers(peers: Peers) -> Check:
    exporter, *importers = (peers.start() for _ in range(3))
    _, handle, offset = _shared(exporter)
    bases = [importer.call("open", handle=handle) for importer in importers]
    importers[0].call("write", pointer=bases[0] + offset, data="77")
    ok = importers[1].call("read", pointer=bases[1] + offset, num_bytes=1) == "77"
    return Check("ipc_two_importers", ok)


def _same_process(peers: Peers) -> Check:
    """Documented not to work; kvkeeper never does it. What happens is told."""
    exporter = peers.start()
    _, handle, _ = _shared(exporter)
    try:
        exporter.call("open", handle=handle)
    except PeerFailed as error:
        return Check("ipc_same_process_open", None, note=f"refused: {error}")
    return Check("ipc_same_process_open", None, note="works")


def _open_twice(peers: Peers) -> Check:
    """Why kvkeeper counts its opens: whether a second one is another mapping, and whether one close ends both."""
    exporter, importer = peers.start(), peers.start()
    _, handle, offset = _shared(exporter)
    try:
        bases = [importer.call("open", handle=handle) for _ in range(2)]
    except PeerFailed as error:
        return Check("ipc_open_twice", None, note=f"the second open is refused: {error}")
    notes = ["one mapping" if bases[0] == bases[1] else "two mappings"]
    if not peers.is_rehearsal:  # reading what is unmapped ends the process: fine there, and told
        importer.call("close", base=bases[0])
        try:
            importer.call("read", pointer=bases[1] + offset, num_bytes=1)
            notes.append("one close leaves the other open")
        except PeerFailed as error:
            notes.append(f"one close ends both: {error}")
    return Check("ipc_open_twice", None, note="; ".join(notes))


def _exporter_killed(peers: Peers) -> Check:
    exporter, importer, witness = peers.start(), peers.start(), peers.start()
    pointer, handle, offset = _shared(exporter)
    exporter.call("write", pointer=pointer, data="5a5a")
    base = importer.call("open", handle=handle)
    exporter.kill()
    kept = importer.call("read", pointer=base + offset, num_bytes=2) == "5a5a"
    importer.call("write", pointer=base + offset, data="a5")
    kept = kept and importer.call("read", pointer=base + offset, num_bytes=1) == "a5"
    before = witness.call("free_bytes")
    importer.call("close", base=base)
    gained = witness.call("free_bytes") - before
    ok = kept and (peers.is_rehearsal or gained >= _SIZE)
    return Check("ipc_exporter_killed", ok, {"bytes_back_at_close": gained}, "" if kept else "the importer lost the bytes")


def _importer_killed(peers: Peers) -> Check:
    """How long until the memory of a killed engine with queued kernels is quiet: what quarantine has to wait for."""
    exporter, importer = peers.start(), peers.start()
    pointer, handle, offset = _shared(exporter)
    base = importer.call("open", handle=handle)
    importer.call("queue_writes", pointer=base + offset, num_bytes=_SIZE)
    first = exporter.call("read", pointer=pointer, num_bytes=1)
    is_writing = _changes(exporter, pointer, first, _LONGEST_S) is not None
    importer.kill()
    killed = last_change = time.perf_counter()
    value = exporter.call("read", pointer=pointer, num_bytes=1)
    while (changed := _changes(exporter, pointer, value, _QUIET_S)) is not None and time.perf_counter() - killed < _LONGEST_S:
        value, last_change = changed, time.perf_counter()
    quiet_ms = (last_change - killed) * 1000
    return Check("ipc_importer_killed", is_writing and quiet_ms < _LONGEST_S * 1000, {"quiet_after_ms": quiet_ms})


def _changes(peer: Peer, pointer: int, value: str, seconds: float) -> str | None:
    """Another value than this one, if it comes within so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if (now := peer.call("read", pointer=pointer, num_bytes=1)) != value:
            return now
    return None


def _stale_handle(peers: Peers) -> Check:
    exporter, importer = peers.start(), peers.start()
    pointer, handle, _ = _shared(exporter)
    exporter.call("free", pointer=pointer)
    try:
        importer.call("open", handle=handle)
    except PeerFailed as error:
        return Check("ipc_stale_handle", True, note=f"refused: {error}")
    return Check("ipc_stale_handle", None, note="a handle of freed memory opens: generations must tell arenas apart")


def _reused_address(peers: Peers) -> Check:
    """Freed and allocated again: whether an old handle opens the new memory, which is why arenas carry a generation."""
    exporter, importer = peers.start(), peers.start()
    pointer, handle, _ = _shared(exporter)
    exporter.call("free", pointer=pointer)
    again, new_handle, offset = _shared(exporter)
    exporter.call("write", pointer=again, data="31")
    base = importer.call("open", handle=new_handle)
    ok = importer.call("read", pointer=base + offset, num_bytes=1) == "31"
    note = (
        ("same" if again == pointer else "another") + " address, " + ("same" if handle == new_handle else "another") + " handle"
    )
    return Check("ipc_reused_address", ok, note=note)


def _context_cost(peers: Peers) -> Check:
    """What a process that holds no more than a context takes of the device."""
    witness, holder = peers.start(), peers.start()
    before = witness.call("free_bytes")
    holder.call("free_bytes")
    return Check("context_cost", None, {"context_bytes": before - witness.call("free_bytes")})


def _large(peers: Peers, num_bytes: int) -> Check:
    exporter, importer = peers.start(), peers.start()
    began = time.perf_counter()
    pointer, handle, offset = _shared(exporter, num_bytes)
    made = time.perf_counter()
    base = importer.call("open", handle=handle)
    opened = time.perf_counter()
    exporter.call("write", pointer=pointer + num_bytes - 2, data="ab")
    ok = importer.call("read", pointer=base + offset + num_bytes - 2, num_bytes=1) == "ab"
    figures = {"allocate_clear_ms": (made - began) * 1000, "open_ms": (opened - made) * 1000}
    return Check(f"ipc_{num_bytes >> 20}_mib", ok, figures)
