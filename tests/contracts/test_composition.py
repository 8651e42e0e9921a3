"""Parts, not bases: a class of a service inherits from a class of ours only where it truly is one."""

from tests.contracts.source_tree import SERVICES, classes, name_of, package_roots

# Bases of ours, each the general case of what inherits from it.
ERRORS = {"CacheError", "EngineError", "ModelError"}
EVICTION_POLICIES = {"EvictionPolicy", "KeyedPolicy"}
ARENAS = {"Arena", "SharedMemoryArena"}
ORDERINGS = {"Ordering"}
CONFIGS = {"ServiceConfig"}
ALLOWED_BASES = ERRORS | EVICTION_POLICIES | ARENAS | ORDERINGS | CONFIGS


def test_classes_of_the_services_have_parts_and_no_bases() -> None:
    everything = list(classes(*package_roots()))
    ours = {name for _, name, _ in everything}
    assert ours >= ALLOWED_BASES, "a base that is allowed is gone: take it off its list"
    found: dict[str, set[str]] = {}
    for file, name, bases in everything:
        is_of_service = name_of(file).split("/")[0] in SERVICES
        if is_of_service and (inherited := (set(bases) & ours) - ALLOWED_BASES):
            found[f"{name_of(file)}:{name}"] = inherited
    assert found == {}, "hand a part in instead"
