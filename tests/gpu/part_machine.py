"""Part m: whether this machine is one on which the other parts can say anything; most of its time is a cold import of torch.

What fails here stops the whole run, with a sentence that says what to do, or the parts that need it (PARTS_THAT_NEED). What
only some checks miss is a finding.
"""

import importlib
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.gpu.checks import Check, guarded

_LEAST = {"torch": (2, 11), "triton": (3, 6), "numpy": (2, 0)}
_PACKAGES = ("grpc", "google.protobuf", "structlog", "safetensors", "tokenizers", "llguidance", "jinja2", "tqdm", "rich",
             "prometheus_client", "kvkeeper.engine_service.server", "kvkeeper.cache_service.server")  # fmt: skip
_FREE_BYTES = 8 << 30  # in the folder of temporary files, for models
_DEVICE_BYTES = 40 << 30
_PIN_BYTES = 64 << 20
PARTS_THAT_NEED = {"memory_between_processes": "qde", "pidfd_open": "qde", "pinned_memory": "qd"}


def run(is_dry: bool) -> Iterator[Check]:
    """Each check stands by itself. A rehearsal leaves out what needs the device."""
    yield _guarded("python", _python)
    yield _guarded("versions", _versions)
    yield _guarded("packages", lambda: _packages(is_dry))
    yield _guarded("temporary_files", _temporary_files)
    yield _guarded("pidfd_open", _pidfd_open)
    yield _guarded("schedstat", _schedstat)
    yield _guarded("memlock", _memlock)
    yield _guarded("descriptors_over_sockets", _descriptors)
    if is_dry:
        yield Check("device", None, note="left out: a rehearsal has none")
    else:
        yield _guarded("device", _device)
        yield _guarded("pinned_memory", _pinned)
        yield _guarded("kernel_compiled_and_launched", _launch)
    yield _guarded("memory_between_processes", lambda: _between_processes(is_dry))


def _guarded(name: str, check: Callable[[], tuple[bool | None, dict[str, Any], str]]) -> Check:
    return guarded(name, lambda: Check(name, *check()))


def _python() -> tuple[bool, dict[str, Any], str]:
    version = platform.python_version_tuple()[:2]
    ok = version in (("3", "11"), ("3", "12"))
    return ok, {}, platform.python_version() + ("" if ok else ": Python 3.11 or 3.12 is needed; name it with PYTHON=")


def _versions() -> tuple[bool, dict[str, Any], str]:
    found, old = [], []
    for name, least in _LEAST.items():
        version = str(importlib.import_module(name).__version__)
        found.append(f"{name} {version}")
        if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < least:
            old.append(f"{name} {'.'.join(map(str, least))} or newer is needed")
    return not old, {}, "; ".join([*found, *old])


def _packages(is_dry: bool) -> tuple[bool, dict[str, Any], str]:
    missing = []
    for name in (*_PACKAGES, *(() if is_dry else ("cuda.bindings.runtime", "cuda.bindings.driver"))):
        try:
            importlib.import_module(name)
        except ImportError as failure:
            missing.append(f"{name} ({failure})")
    return not missing, {}, "" if not missing else f"not there: {', '.join(missing)}; is the bundle installed?"


def _temporary_files() -> tuple[bool, dict[str, Any], str]:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    ok = free >= _FREE_BYTES
    note = "" if ok else f"{tempfile.gettempdir()} has no room for a model: set TMPDIR to a folder with {_FREE_BYTES >> 30} GiB"
    return ok, {"free_gib": free / (1 << 30)}, note


def _pidfd_open() -> tuple[bool, dict[str, Any], str]:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as failure:
        return (
            False,
            {},
            f"{failure}: the cache service could not tell when an engine dies; a container has to allow pidfd_open",
        )
    return True, {}, ""


def _schedstat() -> tuple[bool | None, dict[str, Any], str]:
    path = Path("/proc/self/schedstat")
    ok = path.exists() and len(path.read_text().split()) == 3
    return ok or None, {}, "" if ok else f"{path} cannot be read: a busy service is not told from one that waits"


def _memlock() -> tuple[None, dict[str, Any], str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = ["unlimited" if bound == resource.RLIM_INFINITY else f"{bound >> 20} MiB" for bound in (soft, hard)]
    return None, {}, f"soft {shown[0]}, hard {shown[1]}; host tiers are pinned within it, or by CUDA"


def _descriptors() -> tuple[bool, dict[str, Any], str]:
    """A memfd over a Unix socket, as an arena in shared memory is handed over."""
    memory = os.memfd_create("gpu-check")
    os.ftruncate(memory, 4096)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(5)
        socket.send_fds(ours, [b"x"], [memory])
        _, (received,), _, _ = socket.recv_fds(theirs, 1, 1)
    ok = os.fstat(received).st_size == 4096
    os.close(received)
    os.close(memory)
    return ok, {}, ""


def _device() -> tuple[bool, dict[str, Any], str]:
    import torch

    if not torch.cuda.is_available():
        return False, {}, "no CUDA device is visible to torch; DRY=1 rehearses without one"
    free, total = torch.cuda.mem_get_info(0)
    major, minor = torch.cuda.get_device_capability(0)
    figures = {"free_gib": free / (1 << 30), "total_gib": total / (1 << 30), "multiprocessors": _multiprocessors()}
    problems = [] if major >= 8 else [f"compute capability {major}.{minor}, and 8.0 or newer is needed"]
    if free < _DEVICE_BYTES:
        problems.append(f"{_DEVICE_BYTES >> 30} GiB have to be free: another process uses the device")
    return not problems, figures, "; ".join([f"{torch.cuda.get_device_name(0)}, sm_{major}{minor}", *problems])


def _multiprocessors() -> int:
    import torch

    return torch.cuda.get_device_properties(0).multi_processor_count


def _pinned() -> tuple[bool, dict[str, Any], str]:
    import torch

    memory = torch.ones(_PIN_BYTES, dtype=torch.uint8).pin_memory()
    back = memory.to("cuda", non_blocking=True).cpu()
    return bool(back.all()), {"mib": _PIN_BYTES >> 20}, ""


def _launch() -> tuple[bool, dict[str, Any], str]:
    """The smallest kernel of ours; Triton needs a C compiler for its launcher."""
    import torch

    from kvkeeper.kernels.copy_blocks import copy_blocks

    arena = torch.arange(4, device="cuda", dtype=torch.int64)[:, None].repeat(1, 512)
    copy_blocks(arena, [(3, 1)])
    ok = arena[:, 0].tolist() == [0, 3, 2, 3]
    return ok, {}, "" if ok else "the kernel ran and copied something else"


def _between_processes(is_dry: bool) -> tuple[bool, dict[str, Any], str]:
    from tests.gpu.peer import Peer

    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) if is_dry else None
        with Peer(where) as exporter, Peer(where) as importer:
            pointer = exporter.call("allocate", num_bytes=1 << 21)
            handle, offset = exporter.call("export", pointer=pointer)
            exporter.call("write", pointer=pointer, data="2a")
            base = importer.call("open", handle=handle)
            ok = importer.call("read", pointer=base + offset, num_bytes=1) == "2a"
    return ok, {}, "" if ok else "a process sees other bytes in memory of another: CUDA IPC does not work here"
