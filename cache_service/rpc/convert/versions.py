"""The versions of the protocol that this service speaks, and which one a session speaks.

docs/api/protocol.md says what needs a new number. The range is handed in, so that tests can be services of other times.
"""

from dataclasses import dataclass

from ...core.values.errors import InvalidField, ProtocolVersionUnsupported

_FIRST = 1  # of clients and services that name none
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Versions:
    """Both ends belong to it."""

    oldest: int
    newest: int

    def of_session(self, named: int) -> int:
        """The version that a session with this client speaks. Raises InvalidField, ProtocolVersionUnsupported."""
        if not 0 <= named <= _MAX_INT32:
            raise InvalidField(f"protocol_version: 0 to {_MAX_INT32}", field="protocol_version", limit=_MAX_INT32)
        client = named or _FIRST
        if client < self.oldest:
            text = f"the client speaks version {client} of the protocol, and this service {self.oldest} to {self.newest}"
            raise ProtocolVersionUnsupported(
                f"{text}: upgrade the client",
                protocol_version=client,
                oldest_protocol_version=self.oldest,
                newest_protocol_version=self.newest,
            )
        return min(client, self.newest)


SPOKEN = Versions(oldest=1, newest=3)
