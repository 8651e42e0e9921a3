"""Signals of processes that tests start."""

import signal


def hear_interrupts() -> None:
    """For preexec_fn: a shell starts its background jobs deaf to SIGINT, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
