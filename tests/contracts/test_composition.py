"""Parts, not bases: a class of a service inherits from a class of ours only where it truly is one."""

from tests.contracts.source_tree import SERVICES, classes, name_of, package_roots

# Bases of ours, each the general case of what inherits from it.
ERRORS = {"CacheError", "EngineError", "ModelError"}
EVICTION_POLICIES = {"EvictionPolicy", "FifoPolicy", "KeyedPolicy"}
ARENAS = {"SharedMemoryArena"}
ORDERINGS = {"Ordering"}
ALLOWED_BASES = ERRORS | EVICTION_POLICIES | ARENAS | ORDERINGS

# Classes that are still to be taken apart into parts, with their bases. A class without such a base may not stand here.
STILL_INHERITING: dict[str, set[str]] = {
    "cache_service/core/calls/create.py:CreateCalls": {"PoolState"},
    "cache_service/core/calls/evict.py:EvictionCalls": {"StepApplier"},
    "cache_service/core/calls/garbage.py:VictimCalls": {"StepApplier"},
    "cache_service/core/calls/prefix.py:PrefixCalls": {"StepApplier"},
    "cache_service/core/calls/update.py:SequenceUpdates": {"StepApplier"},
    "cache_service/core/manager.py:PoolManager": {
        "EvictionCalls",
        "OneItemCalls",
        "PrefixCalls",
        "SequenceUpdates",
        "VictimCalls",
    },
    "cache_service/core/step/apply.py:StepApplier": {"CreateCalls"},
    "cache_service/core/step/one_item.py:OneItemCalls": {"StepApplier"},
    "cache_service/core/tables/lifecycle.py:SequenceLifecycle": {"SequenceStarter"},
    "cache_service/core/tables/start.py:SequenceStarter": {"TableBase"},
    "cache_service/rpc/session_calls.py:CacheService": {"PrefixService", "Questions"},
    "engine_service/scheduler/apply_answer.py:Answering": {"Preempting"},
    "engine_service/scheduler/beam_forks.py:Branching": {"Answering"},
    "engine_service/scheduler/preemption.py:Preempting": {"Planning"},
    "engine_service/scheduler/scheduler.py:Scheduler": {"Branching"},
}


def test_classes_of_the_services_have_parts_and_no_bases() -> None:
    everything = list(classes(*package_roots()))
    ours = {name for _, name, _ in everything}
    assert ours >= ALLOWED_BASES, "a base that is allowed is gone: take it off its list"
    found: dict[str, set[str]] = {}
    for file, name, bases in everything:
        is_of_service = name_of(file).split("/")[0] in SERVICES
        if is_of_service and (inherited := (set(bases) & ours) - ALLOWED_BASES):
            found[f"{name_of(file)}:{name}"] = inherited
    assert found == STILL_INHERITING, "hand a part in instead; and what has become parts leaves STILL_INHERITING"
