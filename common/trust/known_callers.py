"""KnownCallers: the credentials of a file, read anew when it changes.

A token that is taken out of the file is refused from the next call on, a second later at most. A file that cannot be used any
more changes nothing: the service goes on with what it had, and says so in its log, once for each state of the file.
"""

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from kvkeeper.common.trust.credentials import Credentials, read_credentials
from kvkeeper.common.trust.private_file import FileRefused, state_of

log = structlog.get_logger()

_LOOK_EVERY_S = 1.0


class KnownCallers:
    """Raises FileRefused where the file cannot be used from the beginning."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._path, self._clock = path, clock
        self._state = state_of(path)
        self._credentials = read_credentials(path)
        self._look_at = clock() + _LOOK_EVERY_S

    def now(self) -> Credentials:
        """Those of the file as it is, or was a second ago."""
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + _LOOK_EVERY_S
            if (state := state_of(self._path)) != self._state:
                self._state = state
                self._read_again()
        return self._credentials

    def _read_again(self) -> None:
        try:
            self._credentials = read_credentials(self._path)
        except FileRefused as error:
            log.warning("credentials_not_reloaded", reason=str(error))
        else:
            known = self._credentials
            log.info("credentials_reloaded", num_tokens=len(known.tokens), num_certificates=len(known.certificates))
