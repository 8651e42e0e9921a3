"""The KV spec of a model, which the cache service compares before engines share a pool."""

import torch

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..compute.served_model import ServedModel

_KV_DTYPES = {
    torch.float16: pb.KV_DTYPE_FLOAT16,
    torch.bfloat16: pb.KV_DTYPE_BFLOAT16,
    torch.float32: pb.KV_DTYPE_FLOAT32,
}


def kv_spec_of(model: ServedModel, block_size: int) -> pb.KvSpec:
    """What must be equal in another engine's model for the two to share K and V."""
    layout = model.layout(block_size)
    return pb.KvSpec(
        model_id=model.model_id,
        revision=model.revision,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        kv_dtype=_KV_DTYPES[layout.dtype],
        block_size=block_size,
        layout=pb.KV_LAYOUT_BLOCK_MAJOR,
        sliding_window=model.sliding_window,
        rope_parameters=model.rope_parameters,
        compute_dtype=model.compute_dtype,
        tensor_parallel_size=1,
    )
