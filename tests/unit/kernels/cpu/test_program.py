"""Programs: what is recorded runs again as it ran, in any number of threads, and what cannot be recorded is refused."""

from functools import partial

import pytest
import torch

from kvkeeper.kernels.activations.gates import silu_and_mul
from kvkeeper.kernels.activations.linear import linear, pack_linear
from kvkeeper.kernels.activations.linear_integers import quantise_linear
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.types import LinearWeight

pytest.importorskip("numba")

from kvkeeper.kernels.cpu.program import Memory, NotRecordable, record


@pytest.fixture(autouse=True)
def kernels():
    torch.manual_seed(0)
    compiled.switch(on=True)
    yield
    compiled.switch(on=False)


class Layers:
    """Products, norms and gates behind each other, as a decoder has them."""

    def __init__(self, pack, dtype=torch.float32, count=3):
        dense = [(torch.randn(96, 32, dtype=dtype) / 6, torch.randn(32, 48, dtype=dtype) / 7) for _ in range(count)]
        self.weights = [tuple(pack(LinearWeight(each)) for each in pair) for pair in dense]
        self.norm = torch.randn(32, dtype=dtype)

    def __call__(self, x):
        residual = None
        for up, down in self.weights:
            y, residual = rms_norm(x, self.norm, 1e-5, residual)
            x = linear(silu_and_mul(linear(y, up)), down)
        return x, residual


KINDS = {
    "float32": (pack_linear, torch.float32),
    "bfloat16": (pack_linear, torch.bfloat16),
    "int8": (partial(quantise_linear, bits=8), torch.float32),
    "int4": (partial(quantise_linear, bits=4), torch.float32),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_program_computes_what_its_function_does(kind, num_rows):
    pack, dtype = KINDS[kind]
    layers, memory = Layers(pack, dtype), Memory()
    if dtype is torch.bfloat16 and layers.weights[0][0].blocks is None:
        pytest.skip("this processor's oneDNN lays bfloat16 out in no blocks")
    x = torch.zeros(num_rows, 32, dtype=dtype)
    program, (out, residual) = record(lambda: layers(x.view(num_rows, 32)), memory)
    for num_threads in (1, 2, 3, 2):
        given = torch.randn(num_rows, 32, dtype=dtype)
        x.copy_(given)
        program.run(num_threads)
        expected, summed = layers(given.clone())
        assert torch.equal(out, expected)
        assert torch.equal(residual, summed)


def test_a_function_does_not_run_while_it_is_recorded():
    x, weight = torch.full((2, 8), 3.0), torch.ones(8)
    program, (out, _) = record(lambda: rms_norm(x, weight, 1e-5, torch.empty(2, 8)), Memory())
    assert torch.equal(x, torch.full((2, 8), 3.0))
    with torch.inference_mode():
        assert out.shape == (2, 8)
    del program


def test_programs_of_one_memory_have_it_in_common():
    layers, memory = Layers(pack_linear, count=8), Memory()
    inputs = {count: torch.randn(count, 32) for count in (4, 1, 3)}
    recorded = {count: record(lambda x=x: layers(x), memory) for count, x in inputs.items()}
    pieces = len(memory._pieces)
    assert pieces < 8  # not one for each of the tensors of eight layers
    record(lambda: layers(inputs[3]), memory)
    assert len(memory._pieces) == pieces
    for count in (1, 4, 3, 1):
        given = torch.randn(count, 32)
        inputs[count].copy_(given)
        program, (out, _) = recorded[count]
        program.run(2)
        assert torch.equal(out, layers(given.clone())[0])


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x + 1, "aten::add"),
        (lambda x: torch.zeros(3), "aten::zeros"),
        (lambda x: x.t().reshape(-1), "aten::(clone|reshape)"),
        (lambda x: x.sum().item(), "aten::sum"),
    ],
)
def test_what_a_program_could_not_do_again_is_refused_by_name(compute, name):
    given = torch.ones(2, 3)
    with pytest.raises(NotRecordable, match=name):
        record(lambda: compute(given), Memory())
    x = torch.ones(1, 4)
    assert torch.equal(rms_norm(x, torch.ones(4), 0.0)[0], x)  # nothing is recorded any more


def test_a_product_of_torch_is_run_between_kernels(monkeypatch):
    weight = pack_linear(LinearWeight(torch.randn(40, 16)))
    assert weight.packed
    monkeypatch.setattr("kvkeeper.kernels.activations.linear.is_for_tiles", lambda _: True)
    x, norm = torch.randn(3, 16), torch.randn(40)
    program, out = record(lambda: rms_norm(linear(x, weight), norm, 1e-5)[0], Memory())
    x.copy_(torch.randn(3, 16))
    program.run(2)
    assert torch.equal(out, rms_norm(linear(x, weight), norm, 1e-5)[0])
