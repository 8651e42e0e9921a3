"""The engine's metrics once more under vLLM's names, where both mean the same, for dashboards and autoscalers made for vLLM.

Owns the table of names and nothing that is counted: each family is made of one or two of ours. Rule: a metric whose meaning
differs is left out, so that no panel shows something else than it says; docs/operate/watch.md says which, and why.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric

_OWN = "kvkeeper_engine_"


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
    """families: all of a scrape. One engine has the number 0, as vLLM's has without data parallelism."""
    by_name = {family.name: family for family in families}
    for same in SAME:
        parts = [by_name[_OWN + name] for name in same.own]
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
