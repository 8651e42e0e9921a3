"""Every test here runs in Triton's interpreter; the kernels were imported for it by the conftest above."""

import pytest


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
