"""The engine's metrics as Prometheus families: own names, and OpenTelemetry's where it has one for the same thing.

OpenTelemetry's names are the generative AI server metrics of its semantic conventions, written as Prometheus writes them. The
help text of a family of GetStatsResponse is the comment of its field.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.utils import floatToGoString

from kvkeeper.common.service.metrics import build_info
from kvkeeper.engine.v1.engine_service_pb2_comments import COMMENTS

from ..compute.served_model import ServedModel
from ..loop.engine import Engine
from ..loop.engine_counts import engine_counts
from ..loop.timings import Histogram
from ..scheduler.policies import POLICIES
from ..values.request import FinishReason
from ..values.step_wait import StepWait

_GAUGES = (
    "num_waiting_requests",
    "num_running_requests",
    "num_preempted_requests",
    "num_kept_results",
    "batch_utilization",
    "token_budget_utilization",
    "kv_utilization",
    "acceptance_rate",
    "cache_wait_share",
)
_COUNTERS = (
    "num_completed_requests",
    "num_failed_requests",
    "num_cancelled_requests",
    "num_handed_over_requests",
    "num_taken_over_requests",
    "num_remote_prefills",
    "num_failed_remote_prefills",
    "num_preemptions",
    "num_swapped_out",
    "num_policy_switches",
    "num_cached_tokens",
    "num_prefill_tokens",
    "num_new_tokens",
    "num_steps",
    "num_copied_blocks",
    "num_guessed_tokens",
    "num_kept_guesses",
    "num_dropped_log_lines",
)
PREFIX = "kvkeeper_engine_"


def engine_metrics(engine: Engine, model: ServedModel, num_kept_results: int) -> Iterator[Metric]:
    """Everything of one scrape. Called on the loop that runs the engine."""
    label = {"model": model.name}
    counts = {**engine_counts(engine), "num_kept_results": num_kept_results}
    for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
        for name in names:
            text = COMMENTS[f"GetStatsResponse.{name}"]
            yield _one(family(PREFIX + name.removeprefix("num_"), text, labels=["model"]), label, counts[name])
    yield from _labelled(engine, label)
    stats = engine.stats
    for name, text, lens in (
        ("prompt_length_tokens", "Prompt tokens of a request that ended.", stats.prompt_lens),
        ("output_length_tokens", "New tokens of a request that ended, of all its continuations.", stats.output_lens),
    ):
        yield _histogram(PREFIX + name, text, lens, label)
    for timings, own, standard, text in (
        (
            stats.first_token,
            "time_to_first_token",
            "gen_ai_server_time_to_first_token",
            "Time from a request's arrival to its first token.",
        ),
        (
            stats.between_tokens,
            "time_between_tokens",
            "gen_ai_server_time_per_output_token",
            "Time between two tokens of a continuation.",
        ),
        (stats.requests, "request_duration", "gen_ai_server_request_duration", "Time from a request's arrival to its end."),
        (stats.steps, "step_duration", None, "Time of one turn of the loop."),
        (stats.cache_waits, "cache_wait", None, "Time that a turn of the loop waited for the cache service."),
    ):
        yield _histogram(f"{PREFIX}{own}_seconds", text, timings.histogram, label)
        if standard is not None:
            yield _histogram(f"{standard}_seconds", text, timings.histogram, {"gen_ai_request_model": model.name})
        for percentile in (50, 99):
            gauge = GaugeMetricFamily(
                f"{PREFIX}{own}_p{percentile}_seconds", f"{text} Over the latest 4,096 values.", labels=["model"]
            )
            yield _one(gauge, label, timings.percentile_ms(percentile) / 1000)
    facts = {**label, "revision": model.revision, "architecture": model.architecture, "compute_dtype": model.compute_dtype}
    yield InfoMetricFamily(PREFIX + "model", "The model that is served.", facts)
    yield build_info(PREFIX)


def _labelled(engine: Engine, label: Mapping[str, str]) -> Iterator[Metric]:
    """What has a label of its own: the policy, how requests ended, why steps waited."""
    policies = GaugeMetricFamily(
        PREFIX + "scheduling_policy", "1 for the policy in force, 0 for the others.", labels=[*label, "policy"]
    )
    for policy in POLICIES:
        policies.add_metric([*label.values(), policy], policy == engine.scheduler.waiting.ordering.policy.name)
    yield policies
    stats = engine.stats
    ended = CounterMetricFamily(
        PREFIX + "ended_requests",
        "Requests that ended, by the finish reason of their last continuation.",
        labels=[*label, "finish_reason"],
    )
    for reason in FinishReason:
        ended.add_metric([*label.values(), reason.name.lower()], stats.num_ended[reason])
    yield ended
    text = COMMENTS["GetStatsResponse.num_step_waits"]
    waits = CounterMetricFamily(PREFIX + "step_waits", text, labels=[*label, "reason"])
    for wait in StepWait:
        waits.add_metric([*label.values(), wait.value], stats.num_waits[wait])
    yield waits


def _one(family: Metric, labels: Mapping[str, str], value: float) -> Metric:
    family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined]  # every family has it
    return family


def _histogram(name: str, text: str, histogram: Histogram, labels: Mapping[str, str]) -> HistogramMetricFamily:
    sums = histogram.counts.cumsum().tolist()
    bounds = [*(floatToGoString(bound) for bound in histogram.bounds), "+Inf"]
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), list(zip(bounds, sums, strict=True)), histogram.total)
    return family
