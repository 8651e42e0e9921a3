"""The engine's metrics as Prometheus families: own names, and OpenTelemetry's where it has one for the same thing.

Names of the latter: the generative AI server metrics of OpenTelemetry's semantic conventions, written Prometheus' way.
"""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from engine_service.engine import Engine
from engine_service.policies import POLICIES
from engine_service.timings import BOUNDS, Timings

_GAUGES = {
    "num_waiting_requests": "Requests that wait for their first step.",
    "num_running_requests": "Requests in the batch.",
    "num_preempted_requests": "Requests that gave their blocks back and wait to resume.",
    "num_kept_results": "Submitted requests whose results are kept.",
    "batch_utilization": "Sequences computed over the most that a step can have, mean of the latest steps.",
    "token_budget_utilization": "Tokens computed over the token budget, mean of the latest steps.",
    "kv_utilization": "Share of the pool's blocks neither free nor evictable, as of the last step.",
    "acceptance_rate": "Guessed tokens that were right over all guessed ones.",
    "cache_wait_share": "Share of the iterations' time spent waiting for the cache service, over the latest steps.",
}
_COUNTERS = {
    "num_completed_requests": "Requests that ended well.",
    "num_failed_requests": "Requests that failed.",
    "num_cancelled_requests": "Requests cancelled, or whose client went away.",
    "num_preemptions": "Preemptions.",
    "num_swapped_out": "Preemptions that kept K and V in the host tier.",
    "num_policy_switches": "Times that the adaptive policy chose another one.",
    "num_cached_tokens": "Prompt tokens taken from the cache.",
    "num_prefill_tokens": "Prompt tokens computed.",
    "num_new_tokens": "Tokens sampled.",
    "num_steps": "Steps run.",
    "num_copied_blocks": "Blocks copied on write.",
    "num_guessed_tokens": "Tokens guessed by speculation.",
    "num_kept_guesses": "Guessed tokens that were right.",
}


def engine_metrics(engine: Engine, num_kept_results: int) -> Iterator[Metric]:
    """Everything of one scrape. Called on the loop that runs the engine."""
    counts = {**engine.counts(), "num_kept_results": num_kept_results}
    for name, text in _GAUGES.items():
        yield GaugeMetricFamily(f"kvkeeper_engine_{name.removeprefix('num_')}", text, value=counts[name])
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"kvkeeper_engine_{name.removeprefix('num_')}", text, value=counts[name])
    policies = GaugeMetricFamily("kvkeeper_engine_scheduling_policy", "1 for the policy in force.", labels=["policy"])
    for name in POLICIES:
        policies.add_metric([name], name == engine.scheduler.waiting.ordering.policy.name)
    yield policies
    stats = engine.stats
    for timings, own, standard, text in (
        (stats.first_token, "time_to_first_token", "gen_ai_server_time_to_first_token", "From arrival to the first token."),
        (stats.between_tokens, "time_between_tokens", "gen_ai_server_time_per_output_token", "Between two tokens."),
        (stats.requests, "request_duration", "gen_ai_server_request_duration", "From arrival to the end."),
        (stats.steps, "step_duration", None, "One turn of the loop."),
        (stats.cache_waits, "cache_wait", None, "Waiting for the cache service, per turn."),
    ):
        yield _histogram(f"kvkeeper_engine_{own}_seconds", text, timings)
        if standard is not None:
            yield _histogram(f"{standard}_seconds", text, timings)
        for percentile in (50, 99):
            name = f"kvkeeper_engine_{own}_p{percentile}_seconds"
            yield GaugeMetricFamily(name, f"{text} Of the latest 4,096.", value=timings.percentile_ms(percentile) / 1000)


def _histogram(name: str, text: str, timings: Timings) -> HistogramMetricFamily:
    sums = timings.counts.cumsum().tolist()
    bounds = [*(floatToGoString(bound) for bound in BOUNDS), "+Inf"]
    return HistogramMetricFamily(name, text, buckets=list(zip(bounds, sums, strict=True)), sum_value=timings.total_seconds)
