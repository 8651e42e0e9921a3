"""The machine code of launches, compiled for sm_90 without a device: gates, and a table that may not get worse.

A day compiles launches of each kind, and each size, dtype and format once.

`python -m tests.unit.kernels.gpu.compiling > tests/unit/kernels/gpu/compiled.json` writes the table anew.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests.support.slices import covering
from tests.unit.kernels.gpu.launches import LAUNCHES, kind_of

_TABLE = Path(__file__).parent / "compiled.json"
_TABLE_TRITON = "3.7"  # another compiler allocates other registers
_WORSE = 1.1
_MOST_SHARED = 227 * 1024
_WIDE = {
    "store_kv_kernel",
    "copy_blocks_kernel",
    "rms_norm_kernel",
    "rotary_kernel",
    "rotary_store_kv_kernel",
    "gate_kernel",
    "store_latent_kernel",
    "quantise_rows_kernel",
}


@pytest.fixture(scope="module")
def compiled(pytestconfig):
    """{launch: figures of each kernel} of the launches of today; see tests.unit.kernels.gpu.compiling.

    Triton's own cache is asked for them, which goes by the source of a kernel and all that it is compiled with.
    """
    chosen = covering(LAUNCHES, lambda launch: {(kind_of(launch),), *launch.split()})
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tests.unit.kernels.gpu.compiling", *chosen]
    done = subprocess.run(command, cwd=pytestconfig.rootpath, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures.keys() == set(chosen)
    return figures


@pytest.fixture(scope="module")
def kernels(compiled):
    """(launch, figures) of every kernel of every launch."""
    return [(launch, figures) for launch, several in compiled.items() for figures in several]


def test_every_launch_compiles(compiled):
    assert {kind_of(launch) for launch in compiled} == {kind_of(launch) for launch in LAUNCHES}
    assert all(compiled.values())


def test_nothing_spills_and_all_fits(kernels):
    for launch, figures in kernels:
        assert figures["stack"] == 0, (launch, figures)
        assert figures["shared"] <= _MOST_SHARED, (launch, figures)


def test_kernels_that_move_memory_move_16_bytes_at_a_time(kernels):
    moving = [(launch, figures) for launch, figures in kernels if figures["kernel"] in _WIDE]
    assert {figures["kernel"] for _, figures in moving} == _WIDE
    for launch, figures in moving:
        assert figures["load.16"] and figures["store.16"], (launch, figures)


def test_what_is_stored_in_few_bits_is_rounded_where_the_definition_rounds(kernels):
    """A product that is fused with the addition that makes it an integer is rounded once, and ties go the other way."""
    rounding = {"store_quantised_kernel", "quantise_rows_kernel"}
    storing = [(launch, figures) for launch, figures in kernels if figures["kernel"] in rounding]
    assert {figures["kernel"] for _, figures in storing} == rounding
    assert not [launch for launch, figures in storing if figures["fused"]]


@pytest.mark.parametrize(
    ("kernel", "instruction"),
    [
        ("prefill_kernel", "wgmma"),
        ("decode_kernel", "mma"),
        ("shared_kernel", "wgmma"),
        ("quantised_prefill_kernel", "wgmma"),
        ("quantised_shared_kernel", "wgmma"),
    ],
)
def test_attention_multiplies_matrices_and_reads_ahead(kernels, kernel, instruction):
    attending = [(launch, figures) for launch, figures in kernels if figures["kernel"] == kernel]
    assert attending
    for launch, figures in attending:
        assert figures[instruction] and figures["cp.async"], (launch, figures)


def test_experts_multiply_matrices_and_read_ahead(kernels):
    """Many rows to an expert by the instructions of whole warp groups."""
    products = [(launch, figures) for launch, figures in kernels if figures["kernel"] == "grouped_linear_kernel"]
    assert products
    for launch, figures in products:
        assert figures["wgmma" if "32768" in launch else "mma"] and figures["cp.async"], (launch, figures)


def test_products_with_integers_multiply_what_is_in_registers_and_read_ahead(kernels):
    products = [(launch, figures) for launch, figures in kernels if figures["kernel"] == "integer_linear_kernel"]
    assert products
    for launch, figures in products:
        assert figures["wgmma"] and figures["cp.async"] and not figures["mma"], (launch, figures)


def test_attention_over_latents_multiplies_matrices_and_reads_ahead(kernels):
    """Many heads by the instructions of whole warp groups."""
    attending = [(launch, figures) for launch, figures in kernels if figures["kernel"] == "latent_attention_kernel"]
    assert attending
    for launch, figures in attending:
        assert figures["mma" if "h16" in launch else "wgmma"] and figures["cp.async"], (launch, figures)


def test_no_kernel_got_worse(compiled):
    if not triton.__version__.startswith(_TABLE_TRITON):
        pytest.skip(f"the table was made with triton {_TABLE_TRITON}, this is {triton.__version__}")
    table = json.loads(_TABLE.read_text())
    assert table.keys() == LAUNCHES.keys()
    for launch, figures in compiled.items():
        for old, new in zip(table[launch], figures, strict=True):
            for figure in ("registers", "shared", "instructions"):
                assert new[figure] <= old[figure] * _WORSE, (launch, figure, old, new)
