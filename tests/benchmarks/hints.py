"""Hit rates with hints of reuse on generated workloads: right ones, wrong ones, and the same one from every request.

Right hints are those of a client that knows what it will ask: NONE where no later request goes on behind this one's end, SOON
where one of the next few does. Wrong ones say the opposite. Hit rates are of the core, and exact.
"""

from collections.abc import Iterator

from kvkeeper.cache_service.core.values.types import ReuseHint
from kvkeeper.cache_service.replay import Requests, replay_core, replay_optimum
from tests.support.reference.workloads import WORKLOADS

_SIZES = (200, 800)
_SOON = 20  # requests
OPPOSITE = {ReuseHint.NONE: ReuseHint.SOON, ReuseHint.SOON: ReuseHint.NONE, ReuseHint.UNSPECIFIED: ReuseHint.UNSPECIFIED}


def figures() -> Iterator[dict[str, object]]:
    for name, workload in WORKLOADS.items():
        requests = workload(0)
        right = right_hints(requests)
        hints = {
            "no": [ReuseHint.UNSPECIFIED] * len(requests),
            "right": right,
            "wrong": [OPPOSITE[hint] for hint in right],
            "all_none": [ReuseHint.NONE] * len(requests),
            "all_soon": [ReuseHint.SOON] * len(requests),
        }
        for num_blocks in _SIZES:
            for policy in ("lru", "adaptive"):
                rates = {kind: replay_core(requests, num_blocks, policy, hints=given).hit_rate for kind, given in hints.items()}
                row: dict[str, object] = {"workload": name, "blocks": num_blocks, "policy": policy}
                row |= {kind: round(rate, 4) for kind, rate in rates.items()}
                yield row | {"optimum": round(replay_optimum(requests, num_blocks).hit_rate, 4)}


def right_hints(requests: Requests) -> list[ReuseHint]:
    """What a client would say that knows all requests to come: equal numbers are equal prefixes."""
    next_use: dict[int, int] = {}
    hints: list[ReuseHint] = []
    for at in range(len(requests) - 1, -1, -1):
        comes = next_use.get(requests[at][-1])
        known = ReuseHint.SOON if comes is not None and comes - at <= _SOON else ReuseHint.UNSPECIFIED
        hints.append(ReuseHint.NONE if comes is None else known)
        next_use.update(dict.fromkeys(requests[at], at))
    return hints[::-1]
