"""FairShare: counts the tokens that each tenant was served, so that the tenant served least starts next.

A tenant is what requests are distinguished by: the tenant that they name, or the client that sent them. The counters are those
of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a computed prompt token counts once, a new token
twice, which is about its cost, and a cached token not at all. A tenant without waiting sequences comes back with the least
count of the tenants that have waiting sequences, so that it cannot save up its share. Thus of two tenants that always have
waiting sequences, neither gets further ahead of the other than by the tokens that one of them can have running. Pure.
"""

from collections.abc import Callable
from operator import attrgetter

from ..values.request import Request

NEW_TOKEN_WEIGHT = 2
_FEW = 64


class FairShare:
    """Served tokens, weighted, by tenant. Counts that no longer matter are forgotten."""

    def __init__(self, tenant_of: Callable[[Request], str] = attrgetter("tenant")) -> None:
        self.tenant_of = tenant_of
        self._served: dict[str, float] = {}
        self._since: dict[str, float] = {}  # tenants with waiting sequences: when they last had a start, or came
        self._num_waiting: dict[str, int] = {}
        self._floor = 0.0  # what the last to start had been served; stands for the waiting ones while there are none

    def served(self, tenant: str) -> float:
        return self._served[tenant]

    def waited(self, tenant: str, now: float) -> float:
        """Seconds since the last start of a tenant that has waiting sequences."""
        return now - self._since[tenant]

    def join(self, tenant: str, now: float) -> None:
        """One more sequence of the tenant waits."""
        if tenant not in self._num_waiting:
            floor = min((self._served[other] for other in self._num_waiting), default=self._floor)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
            self._since[tenant] = now
            self._num_waiting[tenant] = 0
            self._forget(floor)
        self._num_waiting[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One sequence fewer of the tenant waits."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant], self._since[tenant]

    def start(self, tenant: str, num_tokens: int, now: float) -> None:
        """A waiting sequence of the tenant starts, with so many tokens to compute."""
        self._floor = self._served.get(tenant, self._floor)
        self._served[tenant] = self._floor + num_tokens
        if tenant in self._since:
            self._since[tenant] = now

    def charge(self, tenant: str, num_new: int) -> None:
        """The tenant got so many new tokens."""
        self._served[tenant] = self._served.get(tenant, self._floor) + NEW_TOKEN_WEIGHT * num_new

    def _forget(self, floor: float) -> None:
        """Tenants without waiting sequences that would come back with the floor anyway."""
        if len(self._served) > 2 * len(self._num_waiting) + _FEW:
            kept = {name: count for name, count in self._served.items() if name in self._num_waiting or count > floor}
            self._served = kept
