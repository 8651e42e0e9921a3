"""Part a: the behaviour of CUDA memory between processes; a rehearsal runs it on files."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.gpu import ipc_matrix
from tests.gpu.checks import Check


def run(is_dry: bool) -> Iterator[Check]:
    """The matrix, and on a device whether VMM descriptors work too."""
    if is_dry:
        with tempfile.TemporaryDirectory() as folder:
            yield from ipc_matrix.run(Path(folder))
        return
    yield from ipc_matrix.run(None)
    from tests.gpu import vmm

    try:
        yield vmm.probe()
    except OSError as error:
        yield Check("vmm_descriptor", None, note=f"refused: {error}")
