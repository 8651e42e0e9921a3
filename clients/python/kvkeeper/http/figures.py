"""What /metrics shows of the front; the engine has its own page. Of several worker processes it is the sum."""

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, multiprocess

WORKERS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # a folder that worker processes share; prometheus_client's


class Figures:
    """Counts of one process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("kvkeeper_http_requests", "Requests that ended.", ("path", "status"), registry=registry)
        self.open = Gauge("kvkeeper_http_open_requests", "Requests under way.", registry=registry, multiprocess_mode="livesum")

    def page(self) -> bytes:
        """In Prometheus's text."""
        if WORKERS_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        of_all = CollectorRegistry()
        multiprocess.MultiProcessCollector(of_all)
        return generate_latest(of_all)
