"""The engine's metrics as Prometheus families: own names, OpenTelemetry's where it has one for the same thing, and vLLM's.

OpenTelemetry's names are the generative AI server metrics of its semantic conventions, written as Prometheus writes them. The
help text of a family of GetStatsResponse is the comment of its field.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.utils import floatToGoString

from kvkeeper.common.service.metrics import build_info
from kvkeeper.common.service.output import num_dropped_lines
from kvkeeper.engine.v1.engine_service_pb2_comments import COMMENTS

from ..compute.served_model import ServedModel
from ..loop.engine import Engine
from ..loop.stats import Histogram
from ..scheduler.plan import StepWait
from ..scheduler.policies import POLICIES
from ..values.request import FinishReason, RequestState

_SUMS = (
    *("num_completed_requests", "num_failed_requests", "num_cancelled_requests", "num_cached_tokens"),
    *("num_handed_over_requests", "num_taken_over_requests", "num_remote_prefills", "num_failed_remote_prefills"),
    *("num_prefill_tokens", "num_new_tokens", "num_steps", "num_copied_blocks"),
)


def engine_counts(engine: Engine) -> dict[str, float]:
    """Everything that is one number. Called on the loop that runs the engine."""
    stats, scheduler = engine.stats, engine.scheduler
    switch = None if engine.speculator is None else engine.speculator.switch
    states = [generation.state for generation in engine.requests.generations.values()]
    return {
        **{name: getattr(stats, name) for name in _SUMS},
        **stats.utilization(scheduler.limits.max_running, scheduler.limits.token_budget),
        "num_running_requests": states.count(RequestState.RUNNING),
        "num_waiting_requests": len(states) - states.count(RequestState.RUNNING),
        "num_preempted_requests": states.count(RequestState.PREEMPTED),
        "num_preemptions": scheduler.state.num_preemptions,
        "num_swapped_out": scheduler.state.num_swapped_out,
        "num_policy_switches": scheduler.waiting.ordering.num_switches,
        "num_guessed_tokens": switch.num_guessed if switch else 0,
        "num_kept_guesses": switch.num_kept if switch else 0,
        "acceptance_rate": switch.acceptance_rate if switch else 0.0,
        "num_dropped_log_lines": num_dropped_lines(),
        "kv_utilization": engine.memory.kv_utilization if engine.memory is not None else 0.0,
    }


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
PREFIX = "kvkeeper_engine_"


def engine_metrics(engine: Engine, model: ServedModel, num_kept_results: int) -> Iterator[Metric]:
    """Everything of one scrape. Called on the loop that runs the engine."""
    label = {"model": model.name}
    counts = {**engine_counts(engine), "num_kept_results": num_kept_results}
    for name, value in counts.items():
        family, text = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily, COMMENTS[f"GetStatsResponse.{name}"]
        yield _one(family(PREFIX + name.removeprefix("num_"), text, labels=["model"]), label, value)
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


# Owns the table of names and nothing that is counted: each family is made of one or two of ours. Rule: a metric whose meaning
# differs is left out, so that no panel shows something else than it says; docs/operate/watch.md says which, and why.


@dataclass(frozen=True, slots=True)
class Same:
    """A metric of vLLM. own: ours, without the prefix, whose sum it is."""

    name: str
    own: tuple[str, ...]


SAME = (
    Same("vllm:num_requests_running", ("running_requests",)),
    Same("vllm:num_requests_waiting", ("waiting_requests",)),
    Same("vllm:kv_cache_usage_perc", ("kv_utilization",)),
    Same("vllm:num_preemptions", ("preemptions",)),
    Same("vllm:prompt_tokens", ("cached_tokens", "prefill_tokens")),
    Same("vllm:generation_tokens", ("new_tokens",)),
    Same("vllm:prefix_cache_queries", ("cached_tokens", "prefill_tokens")),
    Same("vllm:prefix_cache_hits", ("cached_tokens",)),
    Same("vllm:spec_decode_num_draft_tokens", ("guessed_tokens",)),
    Same("vllm:spec_decode_num_accepted_tokens", ("kept_guesses",)),
    Same("vllm:request_success", ("ended_requests",)),
    Same("vllm:request_prompt_tokens", ("prompt_length_tokens",)),
    Same("vllm:time_to_first_token_seconds", ("time_to_first_token_seconds",)),
    Same("vllm:inter_token_latency_seconds", ("time_between_tokens_seconds",)),
    Same("vllm:e2e_request_latency_seconds", ("request_duration_seconds",)),
)
# Ends that vLLM does not have are left out.
_REASONS = {"stop": "stop", "end_of_sequence": "stop", "length": "length", "cancelled": "abort", "error": "error"}


def vllm_metrics(families: Iterable[Metric], model_id: str) -> Iterator[Metric]:
    """The same under vLLM's names, where both mean the same, for dashboards and autoscalers made for vLLM.

    families: all of a scrape. One engine has the number 0, as vLLM's has without data parallelism.
    """
    by_name = {family.name: family for family in families}
    for same in SAME:
        parts = [by_name[PREFIX + name] for name in same.own]
        metric = Metric(same.name, " + ".join(part.documentation for part in parts), parts[0].type)
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for part in parts:
            for sample in part.samples:
                labels = _labels(sample.labels, model_id)
                if labels is not None:
                    key = same.name + sample.name.removeprefix(part.name), tuple(labels.items())
                    sums[key] = sums.get(key, 0) + sample.value
        for (name, items), value in sums.items():
            metric.add_sample(name, dict(items), value)
        yield metric


def _labels(own: Mapping[str, str], model_id: str) -> dict[str, str] | None:
    """vLLM's, in a sample with these of ours; None where it has no such sample."""
    labels = {"model_name": model_id, "engine": "0"}
    if "finish_reason" in own:
        if own["finish_reason"] not in _REASONS:
            return None
        labels["finished_reason"] = _REASONS[own["finish_reason"]]
    return labels | ({"le": own["le"]} if "le" in own else {})
