"""What an engine computes, as engines tell each other before they share requests."""

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..compute.served_model import ServedModel
from ..values.errors import ForeignEngine
from .decode_request import sampling_message


def identity(model: ServedModel) -> pb.EngineIdentity:
    """All that a request's tokens depend on, beside the request."""
    return pb.EngineIdentity(
        revision=model.revision,
        compute_dtype=model.compute_dtype,
        vocab_size=model.vocab_size,
        sampling_defaults=sampling_message(model.sampling_defaults),
        kv_format=model.kv_format,
    )


def require_same(model: ServedModel, other: pb.EngineIdentity) -> None:
    """Raises ForeignEngine where another engine computes something else."""
    own = identity(model)
    for name in ("revision", "compute_dtype", "vocab_size", "sampling_defaults", "kv_format"):
        if getattr(own, name) != getattr(other, name):
            raise ForeignEngine(f"its {name} is not that of this engine", field=name)
