"""What can go wrong between ranks. Each text is one line."""


class PipeEnded(Exception):
    """The process at the other end has ended, or does not read or answer in time."""


class SumFailed(RuntimeError):
    """Another rank has ended, or did not come in time."""


class RankLost(Exception):
    """A rank has ended or hangs, or its sums fail; another process can take its place. The text names the rank.

    Where its device is lost to it, a FaultTold of device_errors comes instead.
    """


class RankRefused(Exception):
    """The cache service refused a rank. fields: code, reason and message of its error."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__(fields["message"])
        self.fields = fields
