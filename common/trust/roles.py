"""The table of RPCs and roles: which role may make which call. A call that is not in it is refused to every role.

Data alone. `make docs` writes it into docs/SECURITY.md; tests hold it to the descriptors, cell by cell.
"""

from collections.abc import Mapping

from kvkeeper.common.trust.caller import Role

ENGINE, CLIENT, READER, OPERATOR = Role.ENGINE, Role.CLIENT, Role.READER, Role.OPERATOR

_ALL = frozenset(Role)
_STEPPING = frozenset({ENGINE, OPERATOR})  # work on sessions and sequences
_LOOKING = frozenset({ENGINE, READER, OPERATOR})  # changes nothing
_ASKING = frozenset({CLIENT, OPERATOR})  # requests for tokens
_WATCHING = frozenset({CLIENT, READER, OPERATOR})
_OPERATING = frozenset({OPERATOR})

CACHE_SERVICE, ENGINE_SERVICE = "kvkeeper.cache.v1.CacheService", "kvkeeper.engine.v1.EngineService"
GATEWAY_SERVICE = "vllm.grpc.engine.VllmEngine"
HEALTH_SERVICE, REFLECTION_SERVICE = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"

# Probes carry no credential, and hear nothing but whether the service serves.
OPEN = frozenset({f"/{HEALTH_SERVICE}/Check", f"/{HEALTH_SERVICE}/Watch", f"/{HEALTH_SERVICE}/List"})

TABLE: Mapping[str, Mapping[str, frozenset[Role]]] = {
    CACHE_SERVICE: {
        "GetCapabilities": _ALL,
        "CheckAdmission": _LOOKING,
        "OpenSession": _STEPPING,
        "RenewSession": _STEPPING,
        "CloseSession": _STEPPING,
        "Step": _STEPPING,
        "StreamSteps": _STEPPING,
        "CreateSequence": _STEPPING,
        "CreateSequences": _STEPPING,
        "ExtendSequence": _STEPPING,
        "CommitSequence": _STEPPING,
        "ForkSequence": _STEPPING,
        "TruncateSequence": _STEPPING,
        "UpdateSequence": _STEPPING,
        "ReleaseSequence": _STEPPING,
        "SwapOutSequence": _STEPPING,
        "SwapInSequence": _STEPPING,
        "GetSequence": _LOOKING,
        "GetBlock": _LOOKING,
        "SelectVictims": _STEPPING,
        "ListSequences": _LOOKING,
        "HandOffSequence": _STEPPING,
        "TakeSequence": _STEPPING,
        "WithdrawHandOff": _STEPPING,
        "MatchPrefix": _LOOKING,
        "ExplainMatch": _LOOKING,
        "PinPrefix": _STEPPING,
        "UnpinPrefix": _STEPPING,
        "HintPrefix": _STEPPING,
        "StoreLogits": _STEPPING,
        "ReadLogits": _LOOKING,
        "ClearPrefixCache": _STEPPING,
        "EvictBlocks": _STEPPING,
        "CollectGarbage": _STEPPING,
        "GetStats": _LOOKING,
        "WatchEvents": _LOOKING,
        "ReadKv": _LOOKING,
        "WriteKv": _STEPPING,
        "CheckInvariants": _OPERATING,
    },
    ENGINE_SERVICE: {
        "Generate": _ASKING,
        "GenerateMany": _ASKING,
        "SubmitRequest": _ASKING,
        "GetRequest": _ASKING,
        "StreamRequest": _ASKING,
        "CancelRequest": _ASKING,
        "ListRequests": _WATCHING,
        "GetIterationPlan": _OPERATING,
        "Tokenize": _ASKING,
        "Detokenize": _ASKING,
        "HandOver": _STEPPING,
        "ConfirmHandOver": _STEPPING,
        "Prefill": _STEPPING,
        "GetModel": _ALL,
        "GetStats": frozenset({ENGINE, READER, OPERATOR}),
    },
    GATEWAY_SERVICE: {
        "Generate": _ASKING,
        "Abort": _ASKING,
        "HealthCheck": _WATCHING,
        "GetModelInfo": _WATCHING,
        "GetServerInfo": _WATCHING,
        "GetLoads": _WATCHING,
        "GetTokenizer": _WATCHING,
        "SubscribeKvEvents": _WATCHING,
        "Embed": _ASKING,
        "StartProfile": _OPERATING,
        "StopProfile": _OPERATING,
        "FlushCache": _OPERATING,
    },
    REFLECTION_SERVICE: {"ServerReflectionInfo": _ALL},
}
_BY_PATH = {f"/{service}/{name}": roles for service, methods in TABLE.items() for name, roles in methods.items()}
_NONE: frozenset[Role] = frozenset()


def is_known(path: str) -> bool:
    """Whether /package.Service/Method is a call that has a row here."""
    return path in _BY_PATH or path in OPEN


def get_roles(path: str) -> frozenset[Role]:
    """The roles that may call /package.Service/Method."""
    return _BY_PATH.get(path, _NONE)
