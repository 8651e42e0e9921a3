"""`kvkeeper doctor`: what on this host would keep the services from starting or make them less than they can be, with its mend.

Owns no check of the services' own: what `kvkeeper up` refuses is refused here in the same words. Nothing is started, and
nothing is left behind.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from kvkeeper.cli.console.addresses import add_json_flag
from kvkeeper.cli.console.problems import EXIT_FAILED, EXIT_OK, UsageFailure
from kvkeeper.cli.console.tables import table
from kvkeeper.cli.start import host
from kvkeeper.common.service.kernel import ENDS_OF_PROCESSES, SHARED_MEMORY, Lacking


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. state: "ok", "note" where something is missing that not all need, "wrong" where no service
    starts with it. mend: what to do, empty where nothing is.
    """

    what: str
    state: str
    found: str
    mend: str = ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Looks at this host as the services will meet it: packages, processes, memory, addresses, devices. Exit"
        " code 1 where something would keep a service from starting."
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings, as given to the services")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    findings = list(_findings(args.config))
    wrong = [finding for finding in findings if finding.state == "wrong"]
    if args.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        print(table(("", "what", "found"), [(finding.state, finding.what, finding.found) for finding in findings]))
        for finding in findings:
            if finding.mend:
                print(f"\n{finding.state} {finding.what}: {finding.mend}", end="")
        print("\n\nthe services can start here" if not wrong else f"\n\n{len(wrong)} to mend before the services start here")
    return EXIT_FAILED if wrong else EXIT_OK


def _findings(config: str | None) -> Iterator[Finding]:
    yield _make_finding("Python", host.python, "install Python 3.11 or 3.12")
    for name, need, modules, extra in host.PARTS:
        yield _packages(name, need, modules, extra)
    for kernel_need in (SHARED_MEMORY, ENDS_OF_PROCESSES):
        yield _make_finding(kernel_need.what, kernel_need.look, kernel_need.mend)
    yield _make_finding(
        "peers and descriptors on sockets", host.socket_rights, "allow SO_PEERCRED and SCM_RIGHTS in the container"
    )
    yield _make_finding(
        "step lanes", host.step_lane, "without SOCK_SEQPACKET steps go over gRPC, at twice the cost", state="note"
    )
    yield _make_finding("open files", host.open_files, "raise it: ulimit -n 4096, or LimitNOFILE of the unit", state="note")
    yield _make_finding(
        "memory that outlives a service",
        host.tmpfs,
        "--keep needs tmpfs at /dev/shm, or in --memory-dir; in a container mount one: --shm-size, or a memory-backed volume",
        state="note",
    )
    yield _make_finding(
        "locked memory", host.locked_memory, "for CUDA: ulimit -l unlimited, or LimitMEMLOCK=infinity", state="note"
    )
    yield _make_finding(
        "NVIDIA driver", host.nvidia_driver, "for --device cuda install the driver; a CPU needs none", state="note"
    )
    yield _start(config)


def _make_finding(what: str, look: Callable[[], str], mend: str, state: str = "wrong") -> Finding:
    try:
        return Finding(what, "ok", look())
    except Lacking as lacking:
        return Finding(what, state, str(lacking), mend)


def _packages(name: str, is_needed: bool, modules: tuple[str, ...], extra: str) -> Finding:
    from kvkeeper.common.service.extras import install_command, missing

    if names := missing(*modules):
        state = "wrong" if is_needed else "note"
        return Finding(name, state, f"{', '.join(names)} not installed", f"install with: {install_command(extra)}")
    return Finding(name, "ok", host.versions(modules))


def _start(config: str | None) -> Finding:
    """What `kvkeeper up` checks beside the kernel: settings, addresses, the model's folder, and memory."""
    what = "settings, addresses, model, memory"
    from kvkeeper.cli.start.checks import check_settings
    from kvkeeper.common.service.process import StartError

    flags = ["--config", config] if config else []
    try:
        check_settings({"cache": flags, "engine": flags})
    except (UsageFailure, StartError) as error:
        mend = "where kvkeeper runs already: kvkeeper status" if "listens on" in str(error) else "see kvkeeper config show"
        return Finding(what, "wrong", str(error), mend)
    return Finding(what, "ok", f"as {config or 'they are by default'}")
