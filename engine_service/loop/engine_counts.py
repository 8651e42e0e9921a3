"""What GetStats and the metrics report of an engine: sums over its life, and what is true now. Names are the protocol's."""

from kvkeeper.common.service.output import num_dropped_lines

from ..values.request import RequestState
from .engine import Engine

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
