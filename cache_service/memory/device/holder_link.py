"""HolderLink: what the holder has of this service is what this service wants it to have, whichever of the two was away.

Owns a thread that talks with the holder. The service says what is wanted and never waits: the thread puts what the holder
lacks, drops what is not wanted, and begins anew when the holder comes back. Rules: names begin with the service's own prefix,
and no other is touched; nothing is dropped before the service has said that it knows what it wants; each side may die at any
moment, and what is not with the holder then is lost with the service, and with nothing else.
"""

import contextlib
import os
import select
import threading

import structlog

from kvkeeper.common.hold.client import Held, HolderAway, HolderClient
from kvkeeper.common.hold.messages import HoldRefused

log = structlog.get_logger()

_AGAIN = 0.25  # seconds after which a holder that is away is looked for again


class HolderLink:
    """The thread runs from `settle` to `close`."""

    def __init__(self, address: str, prefix: str) -> None:
        """prefix: of all names, for this service alone."""
        self._address = address
        self._prefix = prefix
        self._wanted: dict[str, Held] = {}  # by name; the descriptors are copies of the arenas'
        self._refused: set[str] = set()  # names that the holder would not take
        self._changed = threading.Condition()
        self._is_done = False  # the holder has what is wanted, or is away
        self._is_closing = False
        self._has_warned = False
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread: threading.Thread | None = None

    def probe(self) -> bool:
        """Whether a holder responds now."""
        try:
            with HolderClient(self._address) as client:
                client.held()
        except (HolderAway, HoldRefused) as error:
            self._warn_away(error)
            return False
        return True

    def fetch(self, name: str) -> Held:
        """What the holder has under a name, a descriptor of the caller's. Raises HolderAway, HoldRefused."""
        with HolderClient(self._address) as client:
            return client.get(self._prefix + name)

    def keep(self, name: str, descriptor: int, num_bytes: int) -> None:
        """The holder is to have the memory of this descriptor, which stays the caller's."""
        with self._changed:
            self._wanted[self._prefix + name] = Held(os.dup(descriptor), num_bytes)
            self._note_change()

    def forget(self, name: str) -> None:
        """The holder is not to have it any more. Idempotent."""
        with self._changed:
            if (held := self._wanted.pop(self._prefix + name, None)) is not None:
                os.close(held.descriptor)
                self._note_change()

    def settle(self) -> None:
        """What is wanted is known: from now on the holder gets it, and loses all else of this service. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holder-link", daemon=True)
            self._thread.start()

    def close(self, seconds: float) -> None:
        """Ends the thread once the holder has what is wanted, or is away, or has not replied for so long."""
        if self._thread is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_done, seconds)
                self._is_closing = True
                self._note_change()
            self._thread.join(seconds)
            if self._thread.is_alive():  # in a call, whose timeout ends it; the process may end before
                return
        for held in self._wanted.values():
            os.close(held.descriptor)
        self._wanted.clear()
        os.close(self._woken)
        os.close(self._wake)

    def _note_change(self) -> None:
        self._is_done = False
        with contextlib.suppress(BlockingIOError):  # it is awake enough
            os.write(self._wake, b"\0")

    def _run(self) -> None:
        while not self._is_closing:
            try:
                with HolderClient(self._address) as client:
                    self._refused.clear()
                    self._serve(client)
            except (HolderAway, HoldRefused) as error:
                self._warn_away(error)
                with self._changed:
                    self._is_done = True
                    self._changed.notify_all()
                select.select([self._woken], [], [], _AGAIN)
                self._drain()

    def _serve(self, client: HolderClient) -> None:
        """Until the holder ends, or this link. Raises HolderAway, HoldRefused."""
        while not self._is_closing:
            self._drain()
            held = {name for name in client.held() if name.startswith(self._prefix)}
            self._has_warned = False
            with self._changed:
                missing = {name: one for name, one in self._wanted.items() if name not in held and name not in self._refused}
                surplus = held - self._wanted.keys()
                sent = {name: Held(os.dup(one.descriptor), one.num_bytes) for name, one in missing.items()}
            try:
                num_put = sum(self._put(client, name, one) for name, one in sent.items())
            finally:
                for one in sent.values():
                    os.close(one.descriptor)
            for name in surplus:
                with contextlib.suppress(HoldRefused):  # an operator was faster
                    client.drop(name)
            if sent or surplus:
                log.info("holder_told", num_put=num_put, num_dropped=len(surplus))
                continue  # it is done when the holder says so
            with self._changed:
                if not select.select([self._woken], [], [], 0)[0]:
                    self._is_done = True
                    self._changed.notify_all()
            readable, _, _ = select.select([client.fileno(), self._woken], [], [])
            if client.fileno() in readable:
                raise HolderAway("the holder has ended")

    def _put(self, client: HolderClient, name: str, held: Held) -> bool:
        """Whether the holder took it."""
        try:
            client.put(name, held.num_bytes, held.descriptor)
        except HoldRefused as refusal:
            log.warning("holder_refused", why=str(refusal))
            self._refused.add(name)
            return False
        return True

    def _warn_away(self, error: Exception) -> None:
        """Once, until the holder is back."""
        if not self._has_warned:
            log.warning("holder_away", why=str(error))
        self._has_warned = True

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
