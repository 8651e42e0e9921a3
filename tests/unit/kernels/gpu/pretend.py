"""Tensors that claim to be on CUDA, so that the wrappers pass them to the kernels; their data is on the CPU, or absent."""

import dataclasses

import torch

from kvkeeper.engine_service.compute import penalties
from kvkeeper.engine_service.compute.device.upload import PackedUpload, Staged
from kvkeeper.engine_service.compute.graphs import graphed_steps
from kvkeeper.engine_service.compute.graphs.step_inputs import StepInputs
from kvkeeper.engine_service.model import decoder, experts, latent
from kvkeeper.engine_service.model.loading import filling
from kvkeeper.engine_service.model.recurrent import delta_net, kimi_delta, scan
from kvkeeper.kernels.quantised import store as quantised_store
from kvkeeper.kernels.types import CountedTensors


class PretendCuda(torch.Tensor):
    """A CPU or meta tensor that claims to be on CUDA, with its views and what torch makes of it."""

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)


def on_cuda(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same memory, claiming to be on CUDA."""
    return [tensor.as_subclass(PretendCuda) for tensor in tensors]


def nowhere(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of any size without memory, claiming to be on CUDA: for launches that are compiled, not run."""
    return torch.empty(shape, dtype=dtype, device="meta").as_subclass(PretendCuda)


def pretend_weights_on_cuda(monkeypatch):
    """Weights that are loaded from here on claim to be on CUDA."""

    def allocate(*shape, **kind):
        return torch.empty(shape, **kind).as_subclass(PretendCuda)

    monkeypatch.setattr(filling, "_allocate", allocate)


def pretend_inputs_on_cuda(monkeypatch):
    """What captured decodes read claims to be on CUDA."""
    tensors = StepInputs.tensors

    def all_tensors(self, num_rows):
        return {name: tensor.as_subclass(PretendCuda) for name, tensor in tensors(self, num_rows).items()}

    look = graphed_steps.with_likeliest
    draw, penalised, penalise = graphed_steps.draw_plain, graphed_steps.draw_penalised, graphed_steps.penalise_counted

    def draw_there(step, *drawing):
        return draw(dataclasses.replace(step, values=on_cuda(step.values)[0]), *on_cuda(*drawing))

    def draw_penalised_there(step, *drawing):
        return penalised(step, *on_cuda(*drawing))

    def penalise_there(logits, counts, rows):
        return on_cuda(penalise(*on_cuda(logits, counts), CountedTensors(*on_cuda(*rows))))[0]

    monkeypatch.setattr(StepInputs, "tensors", all_tensors)
    monkeypatch.setattr(graphed_steps, "with_likeliest", lambda values: look(on_cuda(values)[0]))
    monkeypatch.setattr(graphed_steps, "draw_plain", draw_there)
    monkeypatch.setattr(graphed_steps, "draw_penalised", draw_penalised_there)
    for module in (graphed_steps, penalties):
        monkeypatch.setattr(module, "penalise_counted", penalise_there)


_OPS = (
    "attend_as_stored",
    "attend_stored",
    "clamped_swiglu",
    "gelu_and_mul",
    "linear",
    "rms_norm",
    "rotary",
    "rotary_store_kv",
    "rotary_store_quantised",
    "silu_and_mul",
    "square_of_relu",
)


def pretend_model_on_cuda(monkeypatch):
    """A model's uploads, and what an op makes of them, claim to be on CUDA: new memory has forgotten the claim."""
    stage = PackedUpload.stage

    def stage_all(self, arrays):
        copy = stage(self, arrays)
        return Staged(lambda: {name: tensor.as_subclass(PretendCuda) for name, tensor in copy().items()}, copy.give_back)

    def claiming(op):
        def run(x, *args, **options):
            made = op(x, *args, **options)
            parts = tuple(part.as_subclass(type(x)) for part in (made if isinstance(made, tuple) else (made,)))
            return parts if isinstance(made, tuple) else parts[0]

        return run

    for kernels in ("decode_work", "paged_attention_prefill"):
        monkeypatch.setattr(f"kvkeeper.kernels.gpu.{kernels}.num_multiprocessors", lambda device: 2)
    monkeypatch.setattr(PackedUpload, "stage", stage_all)
    monkeypatch.setattr(experts, "linear", claiming(experts.linear))
    monkeypatch.setattr(experts, "grouped_linear", claiming(experts.grouped_linear))
    for name in ("linear", "rms_norm", "rotary", "latent_attention_decode", "latent_attention_prefill"):
        monkeypatch.setattr(latent, name, claiming(getattr(latent, name)))
    for name in ("linear", "gated_norm"):
        for mixer in (delta_net, kimi_delta, scan):
            monkeypatch.setattr(mixer, name, claiming(getattr(mixer, name)))
    for name in ("rms_norm", "rotary"):
        monkeypatch.setattr(quantised_store, name, claiming(getattr(quantised_store, name)))
    for name in _OPS:
        monkeypatch.setattr(decoder, name, claiming(getattr(decoder, name)))
