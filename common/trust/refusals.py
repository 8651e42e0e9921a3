"""What the gate replies to a caller that it does not let in, and how often that was, by reason.

A refusal says what the caller can mend, and nothing of the credentials that are known. The log shows the first refusal of each
reason and then of one a second at most, with the number of those between, so that a flood of calls fills no log.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import structlog
from google.rpc import status_pb2

from kvkeeper.common.service.status import make_status

if TYPE_CHECKING:
    from prometheus_client import Metric

log = structlog.get_logger()

CODES = {
    "NO_CREDENTIAL": grpc.StatusCode.UNAUTHENTICATED,
    "WRONG_CREDENTIAL": grpc.StatusCode.UNAUTHENTICATED,
    "ROLE_NOT_ALLOWED": grpc.StatusCode.PERMISSION_DENIED,
    "TENANT_NOT_ALLOWED": grpc.StatusCode.PERMISSION_DENIED,
}
_REPORT_EVERY_S = 1.0
_NONE: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call is not let in. reason: a name of the protocols' ErrorReason without its prefix."""

    reason: str
    text: str
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> status_pb2.Status:
        return make_status(CODES[self.reason], self.reason, self.text, self.metadata)


NO_CREDENTIAL = Refusal("NO_CREDENTIAL", "this service asks for a token, as metadata `authorization: Bearer TOKEN`")
NO_CERTIFICATE = Refusal("NO_CREDENTIAL", "this service asks for a client certificate, or for a token")
WRONG_TOKEN = Refusal("WRONG_CREDENTIAL", "the token is not known here")
WRONG_CERTIFICATE = Refusal("WRONG_CREDENTIAL", "the names of the certificate stand for no caller, or for several")


def role_refusal(role: str) -> Refusal:
    return Refusal("ROLE_NOT_ALLOWED", f"a caller of role {role} may not make this call", {"role": role})


class RefusedCalls:
    """The count and the log of refused calls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._reported: dict[str, tuple[float, int]] = {}  # by reason: when, and the count then

    def note(self, reason: str, method: str, caller: str) -> None:
        """method: a name of the table, so that nothing that a client made up is logged; caller: the name of its credential."""
        self.counts[reason] += 1
        now, count = self._clock(), self.counts[reason]
        reported_at, reported_count = self._reported.get(reason, (now - _REPORT_EVERY_S, 0))
        if now - reported_at >= _REPORT_EVERY_S:
            self._reported[reason] = now, count
            log.warning("call_refused", reason=reason, method=method, caller=caller, num_calls=count - reported_count)

    def metrics(self, prefix: str, labels: Mapping[str, str], elsewhere: Mapping[str, int] = _NONE) -> "Iterator[Metric]":
        """A family with each reason, also of those that never came. elsewhere: counts of other processes."""
        from prometheus_client.core import CounterMetricFamily  # with an HTTP server, for which no start has to wait

        text = "Calls that were not let in, by reason."
        family = CounterMetricFamily(prefix + "refused_calls", text, labels=[*labels, "reason"])
        for reason in CODES:
            family.add_metric([*labels.values(), reason.lower()], self.counts[reason] + elsewhere.get(reason, 0))
        yield family
