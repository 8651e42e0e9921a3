"""Where the kernel or a container denies a call, both services serve as ever, or refuse to start in one sentence."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeeper.client import EngineClient, GenerateOptions, Sampling
from tests.support.processes.denied_calls import DENIALS, denied, why_not
from tests.support.processes.services import environment, services_up, short_folder, sockets_in, up_command
from tests.support.slices import todays

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"), pytest.mark.in_turn]

END_S = 60.0
PROMPT = list(range(3, 40))
MENDS = {
    "pidfd_open": "run a Linux kernel of 5.3 or later, or allow pidfd_open in the container's seccomp",
    "memfd_create": "run a Linux kernel of 3.17 or later, or allow memfd_create in the container's seccomp",
}
CAUSES = {
    "pidfd_open": f"ends of processes: pidfd_open: Operation not permitted; {MENDS['pidfd_open']}",
    "memfd_create": f"shared memory: memfd_create: Operation not permitted; {MENDS['memfd_create']}",
}
# By the name of a denial: a call that is denied then. It says "denied" where it fails with the errno of the filter, EXDEV.
FIRES = {
    "madvise": "mmap.mmap(-1, 1 << 21).madvise(mmap.MADV_HUGEPAGE)",
    "mlock": "check(libc.mlockall(0x4))",
    "sched_setaffinity": "os.sched_setaffinity(0, os.sched_getaffinity(0))",
    "sched_getaffinity": "os.sched_getaffinity(0)",
    "sched_yield": "os.sched_yield()",
    "scheduling": "os.setpriority(os.PRIO_PROCESS, 0, 0)",
    "numa": "check(libc.syscall(238, 0, None, 0))",
    "hugetlb": "mmap.mmap(-1, 1 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)",
    "o_direct": "os.open('/proc/self/exe', os.O_RDONLY | os.O_DIRECT)",
    "fadvise": "os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)",
    "fallocate": "os.posix_fallocate(file, 0, 4096)",
    "ofd_locks": "fcntl.fcntl(file, fcntl.F_OFD_GETLK, bytes(32))",
    "prctl": "check(libc.prctl(15, b'name', 0, 0, 0))",
    "pidfd_open": "os.pidfd_open(os.getpid())",
    "memfd_create": "os.memfd_create('name')",
}
_CHECKS = (
    "import ctypes, errno, fcntl, mmap, os, tempfile\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
    "def check(code):\n"
    "    if code: raise OSError(ctypes.get_errno(), '')\n"
    "file = os.open(tempfile.gettempdir(), os.O_RDWR | os.O_TMPFILE)\n"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.mark.parametrize("name", DENIALS)
def test_a_denied_call_fails_with_the_errno_of_the_filter(name: str) -> None:
    code = f"{_CHECKS}try: {FIRES[name]}\nexcept OSError as error: print(errno.errorcode[error.errno])"
    done = subprocess.run([*denied(name, "EXDEV"), sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "EXDEV\n", done.stderr


@pytest.mark.parametrize(
    ("names", "code"),
    todays(
        [
            ("madvise", "EINVAL"),  # of a kernel without transparent huge pages
            ("mlock", "EPERM"),
            ("sched_setaffinity", "EPERM"),
            ("sched_getaffinity", "EPERM"),
            ("sched_yield", "EPERM"),
            ("hugetlb", "ENOMEM"),
            ("prctl", "EPERM"),
            ("scheduling,numa,fadvise", "ENOSYS"),
        ],
        2,
    ),
)
def test_hints_cost_nothing_where_they_are_denied(names: str, code: str, folder: Path) -> None:
    with services_up(folder, *sockets_in(folder), before=denied(names, code)) as services:
        generate(services.engine)
    assert "Traceback" not in (log := services.log_path.read_text()), log


def test_a_disk_tier_goes_through_the_cache_of_the_system_where_o_direct_is_denied(folder: Path) -> None:
    flags = ("--cache-disk-path", str(folder / "disk"), "--cache-disk-memory", "64MiB", "--cache-host-memory", "16MiB")
    with services_up(folder, *sockets_in(folder), *flags, before=denied("o_direct", "EPERM")) as services:
        generate(services.engine)
    opened = [line for line in services.log_path.read_text().splitlines() if '"disk_opened"' in line]
    assert [json.loads(line)["direct"] for line in opened] == [False]


@pytest.mark.parametrize("name", CAUSES)
def test_what_cannot_be_done_without_is_told_in_one_sentence(name: str, folder: Path) -> None:
    addresses = sockets_in(folder)
    up = up_command("--cache-listen", addresses[0], "--engine-listen", addresses[1])
    code, said = ended(folder, name, "EPERM", *up)
    assert (code, json.loads(said)["error"]["message"]) == (1, CAUSES[name])
    code, said = ended(folder, name, "EPERM", sys.executable, "-m", "kvkeeper.cache_service", "--listen", addresses[0])
    assert (code, said) == (1, f"kvkeeper cache: {CAUSES[name]}\n")


def test_an_engine_of_several_ranks_needs_the_ends_of_processes(folder: Path) -> None:
    words = ("-m", "kvkeeper.engine_service", "--tensor-parallel", "2", "--listen", sockets_in(folder)[1])
    code, said = ended(folder, "pidfd_open", "ENOSYS", sys.executable, *words)
    cause = f"ends of processes: pidfd_open: Function not implemented; {MENDS['pidfd_open']}"
    assert (code, said) == (1, f"kvkeeper engine: {cause}\n")


@pytest.mark.parametrize("name", ["ofd_locks", "fallocate"])
def test_a_memory_directory_that_cannot_be_had_is_told_in_one_sentence(name: str, folder: Path) -> None:
    words = ("-m", "kvkeeper.cache_service", "--memory-dir", "/dev/shm/" + folder.name, "--listen", sockets_in(folder)[0])
    code, said = ended(folder, name, "EPERM", sys.executable, *words, "--pool-memory", "16MiB")
    assert (code, said.count("\n"), "Operation not permitted" in said) == (1, 1, True), said
    assert not Path("/dev/shm", folder.name).exists()


def test_memory_without_a_name_is_not_asked_for_where_pools_are_files(folder: Path) -> None:
    flags = ("--cache-memory-dir", "/dev/shm/" + folder.name)
    with services_up(folder, *sockets_in(folder), *flags, before=denied("memfd_create", "EPERM")) as services:
        generate(services.engine)


def generate(engine: str) -> None:
    """One request, end to end."""
    with EngineClient(engine) as client:
        generation = client.generate(PROMPT, GenerateOptions(sampling=Sampling(max_tokens=4)))
        assert sum(len(chunk.token_ids) for chunk in generation) == 4


def ended(folder: Path, names: str, code: str, *words: str) -> tuple[int, str]:
    """The exit code of a command that is denied something, and what it said on stderr."""
    done = subprocess.run(
        [*denied(names, code), *words], env=environment(folder), capture_output=True, text=True, timeout=END_S
    )
    return done.returncode, done.stderr
