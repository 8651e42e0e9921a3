"""The compiled kernels' own promises: dtypes that they serve, threads, numbers that are not finite, their place on disk."""

import ast
import importlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations import linear as linear_module
from kvkeeper.kernels.activations.gates import silu_and_mul
from kvkeeper.kernels.activations.linear import linear, pack_linear
from kvkeeper.kernels.activations.linear_integers import linear_integers, quantise_linear
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode, plan_decode
from kvkeeper.kernels.attention.paged_rows import GatherPlan
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.cpu.attention import DirectDecode
from kvkeeper.kernels.cpu.products import multiply
from kvkeeper.kernels.cpu.quantised import of_format
from kvkeeper.kernels.quantised.formats import FP8, INT4, INT8
from kvkeeper.kernels.rotary_store_kv import rotary_store_kv
from kvkeeper.kernels.types import LinearWeight
from tests.unit.kernels.worlds import make_world, random_queries

pytestmark = pytest.mark.each_value

caching = pytest.importorskip("numba.core.caching")


STORED = (INT4, INT8, FP8)
TELL_HITS = """
import sys
from kvkeeper.kernels.cpu.quantised import of_format
from kvkeeper.kernels.quantised.formats import FORMATS
for name in sys.argv[1:]:
    module = of_format(FORMATS[name])
    print(name, *(kernel.cache_hits for kernel in (module.store, module.attend_decode, module.read)))
"""


@pytest.fixture(scope="module", autouse=True)
def kernels():
    compiled.switch(on=True)
    yield importlib.import_module("kvkeeper.kernels.cpu.kernel_parts")
    compiled.switch(on=False)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)  # the same numbers in every run


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request, monkeypatch):
    """Torch's threads; any work is worth them."""
    monkeypatch.setattr("kvkeeper.kernels.cpu.launch._LEAST_WORK", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_they_serve_float32_and_bfloat16_on_a_cpu_and_nothing_else():
    x = torch.ones(2, 4)
    assert all(compiled.serves(each) for each in (x, x.bfloat16()))
    assert not any(compiled.serves(other) for other in (x.half(), x.double(), x.to("meta")))
    for dtype, plan in ((torch.float32, DirectDecode), (torch.bfloat16, DirectDecode), (torch.float16, GatherPlan)):
        world = make_world([5], dtype=dtype)
        assert isinstance(plan_decode(world.block_tables, world.seq_lens, world.layer, dtype, None).read, plan)


@pytest.mark.parametrize("seq_lens", [[1], [700], [0, 3, 0, 900, 129, 128, 0], [0, 0], [5] * 9, [257, 1]])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (130, None), (None, 2.0)])
def test_any_number_of_threads_attends_to_all_keys_once(threads, seq_lens, window, soft_cap):
    world = make_world(seq_lens, num_kv_heads=3)
    q = random_queries(len(seq_lens), 6, 8)
    args = (q, world.layer, world.block_tables, world.seq_lens)
    options = {"scale": 0.3, "window": window, "soft_cap": soft_cap}
    expected = reference.paged_attention_decode(*args, **options)
    torch.testing.assert_close(paged_attention_decode(*args, **options), expected, rtol=0, atol=3e-6)


def test_any_number_of_threads_computes_every_row_once(threads):
    for num_rows in (1, 2, 5, 31):
        x, residual, weight = torch.randn(num_rows, 24), torch.randn(num_rows, 24), torch.randn(24)
        expected, kept = reference.rms_norm(x.clone(), weight, 1e-5, residual)
        found, summed = rms_norm(x, weight, 1e-5, residual)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(summed, kept)
        torch.testing.assert_close(silu_and_mul(x), reference.silu_and_mul(x), rtol=1e-5, atol=1e-6)
        world, table = make_world([31], head_dim=8), torch.ones(num_rows, 8)
        qkv = torch.randn(num_rows, 8, 8)
        rotary_store_kv(qkv[:, :6], qkv[:, 6:], table, 0 * table, world.layer, torch.arange(num_rows) + 4)
        rows = torch.stack([world.layer[slot // 4, 0, slot % 4] for slot in range(4, num_rows + 4)])
        assert torch.equal(rows, qkv[:, 4:6])
        dense = LinearWeight(torch.randn(7, 24), torch.randn(7))
        for bits, most in ((8, 0.02), (4, 0.15)):
            found, weight = linear_integers(x, quantise_linear(dense, bits)), reference.linear(x, dense)
            assert float((found - weight).norm() / weight.norm()) < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 24), (64, 16), (100, 72), (130, 8), (513, 130), (65, 4200)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_number_of_threads_multiplies_rows_by_every_block(threads, shape, has_bias, dtype):
    dense = LinearWeight(torch.randn(shape, dtype=dtype), torch.randn(shape[0], dtype=dtype) if has_bias else None)
    exact = LinearWeight(dense.data.double(), None if dense.bias is None else dense.bias.double())
    packed = pack_linear(dense)
    if packed.blocks is None and dtype is torch.bfloat16:
        pytest.skip("this processor's oneDNN lays bfloat16 out in no blocks")
    assert packed.blocks is not None
    for num_rows in (1, 2, 7, 100):
        x = torch.randn(num_rows + 1, shape[1], dtype=dtype)[1:]
        found, expected = linear(x, packed), reference.linear(x.double(), exact)
        error = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype] * float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=error)
        for row in {0, num_rows // 2, num_rows - 1}:  # a row does not depend on the rows beside it
            assert torch.equal(found[row : row + 1], linear(x[row : row + 1], packed))
    assert linear(x[0], packed).shape == (shape[0],)


def test_many_rows_of_bfloat16_go_to_units_for_tiles_where_there_are_some(monkeypatch):
    packed = pack_linear(LinearWeight(torch.randn(64, 64).bfloat16()))
    if packed.blocks is None:
        pytest.skip("this processor's oneDNN lays bfloat16 out in no blocks")
    x, of_kernel = torch.randn(16, 64).bfloat16(), []
    monkeypatch.setattr(linear_module, "multiply", lambda *args: of_kernel.append(1) or multiply(*args))
    for has_tiles, count in ((False, 2), (True, 1)):
        of_kernel.clear()
        monkeypatch.setattr(linear_module, "_has_tiles", lambda has_tiles=has_tiles: has_tiles)
        few, many = linear(x[:4], packed), linear(x, packed)
        assert len(of_kernel) == count
        torch.testing.assert_close(few.float(), many[:4].float(), rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_that_share_a_prefix_read_what_they_would_alone(threads, dtype):
    block_size, heads, size = 16, 6, 16
    layer = torch.randn(80, 2, block_size, 2, size, dtype=dtype)
    lens = torch.tensor([200, 150, 70, 260, 129, 64, 0], dtype=torch.int32)
    tables = torch.zeros(len(lens), 20, dtype=torch.int32)
    own = iter(range(30, 80))
    for row, shared in enumerate((10, 9, 4, 10, 8, 2, 0)):
        tables[row, :shared] = torch.arange(1, shared + 1)
        for column in range(shared, -(-int(lens[row]) // block_size)):
            tables[row, column] = next(own)
    q = torch.randn(len(lens), heads, size, dtype=dtype)
    for sinks in (None, torch.randn(heads)):
        together = paged_attention_decode(q, layer, tables, lens, scale=0.25, sink_logits=sinks)
        expected = reference.paged_attention_decode(q, layer, tables, lens, scale=0.25, sink_logits=sinks)
        torch.testing.assert_close(together.float(), expected.float(), rtol=0, atol=3e-6 if dtype is torch.float32 else 2e-2)
        for row in range(len(lens)):
            alone = paged_attention_decode(
                q[row : row + 1], layer, tables[row : row + 1], lens[row : row + 1], scale=0.25, sink_logits=sinks
            )
            assert torch.equal(alone, together[row : row + 1])


def test_what_a_kernel_works_on_by_its_address_is_kept_to_its_end():
    for file in Path(compiled.__file__).parent.glob("*_kernels.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                body = ast.unparse(function)
                for array in set(re.findall(r"(\w+)\.ctypes\.data", body)):
                    assert re.search(rf"\n +keep\({array}\)", body), (file.name, function.name)


OTHER_PROCESSOR = """
import torch
from kvkeeper.kernels import reference
from kvkeeper.kernels.activations import linear as linear_module
from kvkeeper.kernels.activations.linear import linear, pack_linear
from kvkeeper.kernels.activations.linear_integers import linear_integers, quantise_linear
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.types import LinearWeight

torch.manual_seed(0)
compiled.switch(on=True)
from kvkeeper.kernels.cpu import tiles
dense = LinearWeight(torch.randn(100, 72))
packed, quantised = pack_linear(dense), [quantise_linear(dense, bits) for bits in (8, 4)]
for rows in (1, 2, 7, 13):
    x = torch.randn(rows, 72)
    torch.testing.assert_close(linear(x, packed), reference.linear(x, dense), rtol=1e-5, atol=1e-4)
    for weight, most in zip(quantised, (0.02, 0.15), strict=True):
        found, expected = linear_integers(x, weight), reference.linear(x, dense)
        assert float((found - expected).norm() / expected.norm()) < most
print(tiles.LANES, packed.blocks is not None, *(linear_integers(x, weight).double().sum().item() for weight in quantised))
"""


def multiply_elsewhere(**environment):
    """What OTHER_PROCESSOR prints where numba and oneDNN are told of another one."""
    run = [sys.executable, "-c", OTHER_PROCESSOR]
    told = subprocess.run(run, capture_output=True, text=True, check=False, timeout=900, env={**os.environ, **environment})
    assert told.returncode == 0, told.stderr
    return told.stdout.split()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
def test_a_processor_with_avx2_alone_multiplies_too_and_integers_to_the_same_bits():
    features = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+sse4.2,+sse4.1,+ssse3,+sse3,+sse2,+sse,+movbe"
    found = multiply_elsewhere(NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=features, ONEDNN_MAX_CPU_ISA="AVX2")
    assert found[:2] == ["8", "True"]
    oldest = multiply_elsewhere(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="+sse,+sse2", ONEDNN_MAX_CPU_ISA="SSE41")
    assert oldest[0] == "4"
    assert found[2:] == oldest[2:] == multiply_elsewhere()[2:]


@pytest.mark.parametrize("shape", [(7, 24), (64, 16), (3, 1), (513, 130), (65, 4200)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_any_number_of_threads_multiplies_rows_of_integers(threads, shape, has_bias, bits):
    dense = LinearWeight(torch.randn(shape), torch.randn(shape[0]) if has_bias else None)
    weight = quantise_linear(dense, bits)
    torch.set_num_threads(1)
    inputs = [torch.randn(1, shape[1]), 1e3 * torch.randn(shape[1]), torch.zeros(1, 1, shape[1]), torch.randn(100, shape[1])]
    alone = [linear(x, weight) for x in inputs]
    torch.set_num_threads(threads)
    for x, expected in zip(inputs, alone, strict=True):
        assert torch.equal(linear(x, weight), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_shows_in_its_row_and_in_no_other(bad):
    x, weight = torch.randn(3, 16), torch.ones(16)
    x[1, 5] = bad
    dense = LinearWeight(torch.randn(4, 16))
    weights = pack_linear(dense), quantise_linear(dense, 8), quantise_linear(dense, 4)
    row_by_row = [torch.cat([linear(row[None], each) for row in x]) for each in weights]
    together = [linear(x, each) for each in weights[1:]]
    for found in (rms_norm(x.clone(), weight, 1e-5)[0], *together, *row_by_row):
        assert found.isfinite().all(1).tolist() == [True, False, True]
    gate_up = torch.randn(3, 16)
    gate_up[1, 13] = bad
    assert silu_and_mul(gate_up).isfinite().all(1).tolist() == [True, False, True]
    for part, cap in ((0, None), (1, None), (0, 3.0)):
        world = make_world([9, 9, 9])
        world.layer[world.block_tables[1, 1], part, 2, 0, 3] = bad
        args = (random_queries(3, 4, 8), world.layer, world.block_tables, world.seq_lens)
        found = paged_attention_decode(*args, scale=0.3, soft_cap=cap).isfinite().flatten(1).all(1).tolist()
        if cap is None or bad != bad:  # a soft cap bends what is infinite to a finite score
            assert found == [True, False, True]


def test_exponentials_of_any_size_are_right():
    wide = torch.cat((torch.linspace(-120, 120, 4001), torch.linspace(-1e-3, 1e-3, 99)))
    gate_up = torch.stack((wide, torch.ones_like(wide)), 1)
    torch.testing.assert_close(silu_and_mul(gate_up), reference.silu_and_mul(gate_up), rtol=1e-6, atol=1e-30)


def test_without_a_folder_to_write_to_they_are_not_kept(kernels, monkeypatch):
    assert compiled.are_kept() == kernels.ARE_KEPT
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert not kernels._can_keep()


def test_another_process_finds_the_kernels_of_each_format_on_disk(kernels):
    if not kernels.ARE_KEPT:
        pytest.skip("there is no folder to keep them in")
    modules = [of_format(kv_format) for kv_format in STORED]
    assert len({module.store.native_name for module in modules}) == len(STORED)  # or one would be another's on disk
    names = [kv_format.name for kv_format in STORED]
    told = subprocess.run([sys.executable, "-c", TELL_HITS, *names], capture_output=True, text=True, check=True, timeout=300)
    assert told.stdout.splitlines() == [f"{name} 1 1 1" for name in names]
