"""Runs a command under a kernel that denies it some calls, as a strict container or another kernel does.

`python -m tests.support.processes.denied_calls NAMES ERRNO COMMAND...`, with names of DENIALS and an errno such as EPERM: a
seccomp filter is put over this process, which then becomes the command. Its children inherit the filter, so what it starts is
denied the same. Works on x86-64 alone, whose numbers of calls stand here.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_MAP_HUGETLB, _MFD_HUGETLB, _O_DIRECT = 0x40000, 0x4, 0o40000
_F_OFD = 0x20  # in the three commands of locks on descriptions, 36 to 38, and in no other that is used

_PR_SET_NO_NEW_PRIVS, _SECCOMP, _SET_MODE_FILTER, _ALL_THREADS = 38, 317, 1, 1
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of classic BPF
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
_X86_64 = 0xC000003E


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the kernel by its number; argument: the one that must have one of the bits, else all such calls are meant."""

    number: int
    argument: int = 0
    bits: int = 0


DENIALS = {
    "madvise": [Call(28)],
    "mlock": [Call(149), Call(151), Call(325)],  # with mlockall and mlock2
    "sched_setaffinity": [Call(203)],
    "sched_yield": [Call(24)],
    "scheduling": [Call(141), Call(142), Call(144), Call(251), Call(314)],  # priorities of the processor and of disks
    "numa": [Call(237), Call(238), Call(239), Call(256), Call(279)],
    "hugetlb": [Call(9, 3, _MAP_HUGETLB), Call(319, 1, _MFD_HUGETLB)],  # mmap, memfd_create
    "o_direct": [Call(2, 1, _O_DIRECT), Call(257, 2, _O_DIRECT)],  # open, openat
    "fadvise": [Call(221), Call(187)],  # with readahead
    "fallocate": [Call(285)],
    "ofd_locks": [Call(72, 1, _F_OFD)],
    "sched_getaffinity": [Call(204)],
    "prctl": [Call(157)],
    "pidfd_open": [Call(434)],
    "memfd_create": [Call(319)],
}


def why_not() -> str:
    """Why calls cannot be denied on this machine; empty where they can."""
    machine = platform.machine()
    return "" if machine == "x86_64" else f"the numbers of system calls are those of x86-64, and this machine is {machine}"


def deny(calls: Sequence[Call], code: int) -> None:
    """Denies this process and its children the calls from now on, with this errno. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    program = _program(calls, code)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(_SECCOMP, _SET_MODE_FILTER, _ALL_THREADS, header):
        raise OSError(ctypes.get_errno(), "the filter cannot be set")


def _program(calls: Sequence[Call], code: int) -> bytes:
    """In classic BPF. Calls of another architecture are let through."""
    steps = [_step(_LOAD, _ARCHITECTURE_AT), _step(_JUMP_EQUAL, _X86_64, 1, 0), _step(_RETURN, _ALLOW)]
    for call in calls:
        found = [_step(_RETURN, _ERRNO | code)]
        if call.bits:
            found[:0] = [_step(_LOAD, _ARGUMENTS_AT + 8 * call.argument), _step(_JUMP_ANY_BIT, call.bits, 0, 1)]
        steps += [_step(_LOAD, _NUMBER_AT), _step(_JUMP_EQUAL, call.number, 0, len(found)), *found]
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def _step(instruction: int, operand: int, if_so: int = 0, if_not: int = 0) -> bytes:
    """struct sock_filter; if_so, if_not: steps that a jump leaves out."""
    return struct.pack("HBBI", instruction, if_so, if_not, operand)


def denied(names: str, code: str) -> list[str]:
    """The words before a command that is denied what the names say, joined by commas."""
    return [sys.executable, "-m", "tests.support.processes.denied_calls", names, code]


if __name__ == "__main__":
    deny([call for name in sys.argv[1].split(",") for call in DENIALS[name]], getattr(errno, sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
