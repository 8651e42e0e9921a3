"""Signals of processes that tests start."""

import signal


def hear_interrupts() -> None:
    """Lets processes that are started from now on hear SIGINT.

    A shell starts its background jobs deaf to it, and their children inherit that. It is changed here and not in the child by a
    preexec_fn, because that makes Python fork: gRPC's handlers then start threads in the child, whose descriptors are closed
    before it becomes another program, and it aborts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
