"""The command `kvkeeper`: start the services, ask them, generate.

Exit codes: 0 done; 1 refused or failed; 2 wrong usage; 3 a service is down; 130 interrupted (143 where SIGTERM ended
`up`). Results go to stdout, everything else to stderr. Nothing is imported before `main` runs, so that Ctrl-C during the
imports ends in an exit code too.

Owns the commands, in a folder for each concept: start, show, generation, publishing, benchmark; console has what they share.
May import kvkeeper.client, kvkeeper.common.service and kvkeeper.common.tracing; a service only when its command runs.
"""

import os
import sys
from collections.abc import Sequence

_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Usage errors and --help end in argparse's SystemExit (2 and 0)."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc loads: errors are reported in one line, by this program
    try:
        from kvkeeper.cli import commands

        return commands.run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
