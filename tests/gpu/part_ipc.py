"""Part a: the behaviour of CUDA memory between processes; a rehearsal runs it on files."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.gpu import ipc_matrix, vmm
from tests.gpu.checks import Check


def run(is_dry: bool) -> Iterator[Check]:
    """The matrix of IPC handles, and memory that is shared by descriptors."""
    if is_dry:
        with tempfile.TemporaryDirectory() as folder:
            yield from ipc_matrix.run(Path(folder))
    else:
        yield from ipc_matrix.run(None)
    yield from vmm.run(is_dry)
