"""--cpu-kernels: which kernels a config turns on, and the refusal of those that are not installed."""

import dataclasses

import pytest
import torch

from kvkeeper.common.service.process import StartError
from kvkeeper.engine_service import preflight
from kvkeeper.engine_service.compute.cpu_kernels import switch_kernels
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.dtype_name import dtype_name
from kvkeeper.engine_service.preflight import check_start
from kvkeeper.kernels.cpu import compiled, features
from kvkeeper.kernels.cpu.features import multiplies_bfloat16

CONFIG = EngineConfig(listen="127.0.0.1:0")


@pytest.fixture(autouse=True)
def off_again():
    yield
    compiled.switch(on=False)


@pytest.mark.skipif(not compiled.is_installed(), reason="numba, of the extra cpu, is not installed")
@pytest.mark.parametrize(
    ("changes", "is_on"),
    [
        ({}, True),
        ({"dtype": "float32", "cpu_kernels": "compiled"}, True),
        ({"dtype": "int8"}, True),
        ({"cpu_kernels": "torch"}, False),
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "float16"}, False),
        ({"device": "cuda"}, False),
        ({"model": "hash-toy"}, False),
    ],
)
def test_they_are_on_where_they_have_something_to_do(changes, is_on):
    for before in (True, False):
        compiled.switch(on=before)
        switch_kernels(dataclasses.replace(CONFIG, **changes))
        assert compiled.serves(torch.ones(1)) == is_on


def test_without_numba_auto_is_torch_and_compiled_is_refused(monkeypatch):
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    switch_kernels(CONFIG)
    assert not compiled.serves(torch.ones(1))
    monkeypatch.setattr(preflight, "missing", lambda *names: [name for name in names if name == "numba"])
    check_start(CONFIG)
    with pytest.raises(StartError, match=r"--cpu-kernels compiled: numba is not installed; install it with: .*cpu"):
        check_start(dataclasses.replace(CONFIG, cpu_kernels="compiled"))


@pytest.mark.parametrize("changes", [{"dtype": "float16"}, {"model": "hash-toy"}])
def test_they_are_refused_where_they_serve_nothing(changes):
    with pytest.raises(StartError, match="--cpu-kernels compiled: they are for"):
        check_start(dataclasses.replace(CONFIG, cpu_kernels="compiled", **changes))


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_auto_computes_in_bfloat16_where_weights_are_and_the_processor_multiplies_it(has_bfloat16):
    for stored in ("bfloat16", "torch.bfloat16", None, "float32", "float16"):
        expected = "bfloat16" if has_bfloat16 and stored not in ("float32", "float16") else "float32"
        assert dtype_name(stored, "cpu", "auto", has_bfloat16=has_bfloat16) == expected
    assert dtype_name("bfloat16", "cuda", "auto", has_bfloat16=has_bfloat16) == "bfloat16"
    assert dtype_name("bfloat16", "cpu", "float32", has_bfloat16=has_bfloat16) == "float32"


def test_features_are_those_that_numba_compiles_for(monkeypatch):
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx512bf16,+avx512bw,+avx512vl,+avx2")
    assert multiplies_bfloat16()
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx512bw,+avx512vl,-avx512bf16")
    assert not multiplies_bfloat16()
    monkeypatch.setattr(features, "find_spec", lambda name: None)
    assert not multiplies_bfloat16()
