"""The two paths of a CPU's kernels, for modules that hold both to the same references."""

import pytest


@pytest.fixture(scope="module", params=["torch", "compiled"])
def kernel_path(request):
    """Every test of the module runs with torch's ops, and again with the compiled kernels where numba is installed."""
    from kvkeeper.kernels.cpu import compiled  # with torch, which the core's tests do without

    if request.param == "compiled" and not compiled.is_installed():
        pytest.skip("numba, of the extra cpu, is not installed")
    compiled.switch(on=request.param == "compiled")
    yield request.param
    compiled.switch(on=False)
