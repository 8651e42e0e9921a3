"""Prefill by a stand-in for FlashInfer: what it is given, and that its results are those of our reference."""

import ast
import importlib.metadata
import inspect
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.attention import flashinfer_prefill
from kvkeeper.kernels.attention.flashinfer_prefill import (
    FlashInferPlan,
    Wrappers,
    find_flashinfer,
    find_pages,
    make_workspace,
    why_not_for,
)
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from kvkeeper.kernels.errors import KernelArgumentError
from tests.support.stand_ins import flashinfer
from tests.unit.kernels.worlds import make_world, random_queries

LENGTHS, QUERIES = [15, 16, 17, 50, 33], [15, 3, 1, 20, 33]
SCALE = 0.3


def plan_of(world, queries, window=None):
    locs = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    tables, lens = world.block_tables.numpy(), world.seq_lens.numpy()
    pages = find_pages(tables, lens, locs, world.layout.block_size, window)
    wrappers = Wrappers(flashinfer, make_workspace(world.layer.device, 2, world.layout.head_dim))
    return FlashInferPlan(wrappers, pages, torch.from_numpy(pages.pages)), torch.from_numpy(locs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "window", "soft_cap"),
    [(64, 16, None, None), (128, 4, 7, None), (256, 16, None, 2.0), (64, 8, 1, 2.0), (64, 16, 100, None)],
)
def test_results_are_those_of_the_reference(dtype, head_dim, block_size, window, soft_cap):
    world = make_world(LENGTHS, block_size=block_size, head_dim=head_dim, dtype=dtype)
    plan, locs = plan_of(world, QUERIES, window)
    q = random_queries(sum(QUERIES), 6, head_dim, dtype)
    args = world.layer, world.block_tables, world.seq_lens, locs
    options = {"scale": SCALE, "window": window, "soft_cap": soft_cap}
    found = paged_attention_prefill(q, *args, **options, plan=plan)
    expected = reference.paged_attention_prefill(q.float(), world.layer.float(), *args[1:], **options)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=2e-2)


def test_queries_may_lie_apart():
    world = make_world(LENGTHS, block_size=16, head_dim=64, dtype=torch.float16)
    plan, locs = plan_of(world, QUERIES)
    both = random_queries(sum(QUERIES), 12, 64, torch.float16)
    args = world.layer, world.block_tables, world.seq_lens, locs
    found = paged_attention_prefill(both[:, 6:], *args, scale=SCALE, plan=plan)
    again, _ = plan_of(world, QUERIES)
    assert torch.equal(found, paged_attention_prefill(both[:, 6:].contiguous(), *args, scale=SCALE, plan=again))


def test_one_plan_serves_the_layers_that_are_alike():
    world = make_world(LENGTHS, block_size=16, head_dim=64, dtype=torch.float16)
    plan, locs = plan_of(world, QUERIES)
    q = random_queries(sum(QUERIES), 6, 64, torch.float16)
    flashinfer.made.clear()
    for scale in (SCALE, SCALE, 0.5, SCALE):
        paged_attention_prefill(q, world.layer, world.block_tables, world.seq_lens, locs, scale=scale, plan=plan)
    assert [(len(wrapper.plans), wrapper.num_runs) for wrapper in flashinfer.made] == [(1, 3), (1, 1)]


def test_pages_before_the_first_window_are_not_named():
    """They may be another sequence's by now."""
    tables = np.array([[90, 91, 5, 6, 7, 0], [8, 9, 0, 0, 0, 0]], np.int32)
    pages = find_pages(tables, np.array([17, 5], np.int32), np.array([0, 3, 8], np.int32), 4, 5)
    assert pages.pages.tolist() == [5, 6, 7, 8, 9], "queries 14 to 16 see tokens from 10 on"
    assert pages.page_starts.tolist() == [0, 3, 5]
    assert pages.last_lens.tolist() == [1, 1]
    whole = find_pages(tables, np.array([17, 5], np.int32), np.array([0, 3, 8], np.int32), 4, None)
    assert whole.pages.tolist() == [90, 91, 5, 6, 7, 8, 9]


def test_what_it_knows_nothing_of_is_refused():
    world = make_world(LENGTHS, block_size=16, head_dim=64, dtype=torch.float16)
    plan, locs = plan_of(world, QUERIES)
    q = random_queries(sum(QUERIES), 6, 64, torch.float16)
    args = q, world.layer, world.block_tables, world.seq_lens, locs
    with pytest.raises(KernelArgumentError, match="sinks"):
        paged_attention_prefill(*args, scale=SCALE, sink_logits=torch.zeros(6), plan=plan)
    with pytest.raises(KernelArgumentError, match="queries"):
        paged_attention_prefill(q[1:], *args[1:], scale=SCALE, plan=plan)


def test_k_and_v_that_it_serves():
    assert not why_not_for(torch.bfloat16, 128)
    assert why_not_for(torch.float32, 128) == "K and V are float32"
    assert why_not_for(torch.float16, 96) == "heads have 96 elements"


@pytest.mark.parametrize(
    ("version", "used"), [("0.6.1", False), ("0.6.2", True), ("0.7.2.post1", True), ("0.8.0", False), ("1.0", False)]
)
def test_versions_that_are_known_are_used(version, used, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(flashinfer_prefill, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    found = find_flashinfer(wanted=True)
    assert (found.package is flashinfer) == used == (not found.why_not)
    assert used or version in found.why_not
    assert find_flashinfer(wanted=False).why_not == "--no-flashinfer"


def test_a_package_that_cannot_be_imported_says_why(monkeypatch):
    def broken(name):
        raise OSError("libcuda.so.1 is missing")

    monkeypatch.setattr(flashinfer_prefill, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.7.2")
    monkeypatch.setattr(flashinfer_prefill.importlib, "import_module", broken)
    assert "libcuda.so.1 is missing" in find_flashinfer(wanted=True).why_not


def test_the_package_takes_what_its_stand_in_takes():
    """By its source, which needs no device."""
    spec = find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("flashinfer is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "prefill.py").read_text())
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    (real,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == wrapper.__name__]
    methods = {node.name: node.args for node in real.body if isinstance(node, ast.FunctionDef)}  # the last overload counts
    for name in ("__init__", "plan", "run"):
        args, ours = methods[name], inspect.signature(getattr(wrapper, name)).parameters.values()
        named = [each.name for each in ours if each.kind is not each.VAR_KEYWORD]
        placed = [each.name for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD]
        assert [arg.arg for arg in args.args][: len(placed)] == placed
        assert set(named) <= {arg.arg for arg in (*args.args, *args.kwonlyargs)}
