"""What this host gives to processes: looked at by trying it, with nothing left behind.

Each look returns in words what was found. Knows no flags and prints nothing. Imports no torch and no grpc.
"""

import ctypes
import os
import platform
import resource
import shutil
import socket
import struct
import sys
from importlib import metadata
from pathlib import Path

from kvkeeper.common.service.kernel import Lacking
from kvkeeper.common.service.mounts import IN_MEMORY, file_system
from kvkeeper.common.service.sizes import size

# By name: whether a service needs them, modules, and the extra that brings them.
PARTS = (
    ("engine packages", True, ("torch", "safetensors", "tokenizers", "llguidance", "jinja2"), "engine"),
    ("kernels for this CPU", False, ("numba",), "cpu"),
    ("models through transformers", False, ("transformers",), "transformers"),
    ("models of GGUF files", False, ("gguf", "transformers", "accelerate"), "gguf"),
    ("gateway for OpenAI's clients", False, ("smg", "smg_grpc_proto"), "gateway"),
    ("traces", False, ("opentelemetry.sdk",), "tracing"),
)
_DISTRIBUTIONS = {"smg_grpc_proto": "smg-grpc-proto", "opentelemetry.sdk": "opentelemetry-sdk"}
_FEWEST_FILES = 2048  # of 1,024 connections, with room for descriptors of pools


def python() -> str:
    found = platform.python_version()
    if not (3, 11) <= sys.version_info < (3, 13):
        raise Lacking(found)
    return found


def versions(modules: tuple[str, ...]) -> str:
    """Names and versions of the packages that bring the modules."""
    found = []
    for module in modules:
        name = _DISTRIBUTIONS.get(module, module)
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(name)
    return ", ".join(found)


def socket_rights() -> str:
    """A descriptor goes over a Unix socket, and the kernel names the peer."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    reading, writing = os.pipe()
    try:
        socket.send_fds(one, [b"x"], [reading])
        _, descriptors, _, _ = socket.recv_fds(other, 1, 1)
        for descriptor in descriptors:
            os.close(descriptor)
        peer, *_ = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if len(descriptors) != 1 or peer != os.getpid():
            raise Lacking("the kernel does not tell the peer's process")
    except OSError as error:
        raise Lacking(f"Unix sockets: {error.strerror}") from None
    finally:
        os.close(reading)
        os.close(writing)
        one.close()
        other.close()
    return "SCM_RIGHTS and SO_PEERCRED work"


def step_lane() -> str:
    try:
        for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
            end.close()
    except OSError as error:
        raise Lacking(f"SOCK_SEQPACKET: {error.strerror}") from None
    return "SOCK_SEQPACKET works"


def open_files() -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _FEWEST_FILES:
        raise Lacking(f"at most {most}, and {_FEWEST_FILES} let 1,024 clients connect")
    return "no limit" if most == resource.RLIM_INFINITY else f"at most {most:,}"


def tmpfs(folder: Path = Path("/dev/shm")) -> str:
    """The free memory of the folder in which kept memory lies by default."""
    try:
        kind = file_system(folder)
    except OSError as error:
        raise Lacking(f"{folder}: {error.strerror}") from None
    if kind not in IN_MEMORY:
        raise Lacking(f"{folder} lies on {kind}")
    return f"{folder} has {size(shutil.disk_usage(folder).free)} free"


def locked_memory() -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if most != resource.RLIM_INFINITY and most < 1 << 30:
        raise Lacking(f"at most {size(most)} can be pinned for copies to a device")
    return "no limit" if most == resource.RLIM_INFINITY else f"at most {size(most)}"


def nvidia_driver() -> str:
    """The CUDA version that the driver speaks. The driver is not initialised."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise Lacking("none") from None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        raise Lacking("libcuda.so.1 does not answer")
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
