"""What the gateway's process writes goes through the queue of `serve`: a reader that is at rest stops neither of them."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from kvkeeper.cli.start import processes
from kvkeeper.cli.start.processes import ServiceProcess
from kvkeeper.common.service.output import queued

DEADLINE_S = 20.0
CHATTY = """
import os
for descriptor in (1, 2):
    for number in range(4096):
        os.write(descriptor, b"%d " % number + 500 * b"x" + b"\\n")
"""


async def test_a_gateway_whose_output_is_not_read_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chatty_gateway.py").write_text(CHATTY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setattr(processes, "GATEWAY", "chatty_gateway")
    reading, writing = os.pipe()  # and nothing reads
    with os.fdopen(writing, "w") as unread:
        monkeypatch.setattr(sys, "stderr", unread)
        with queued():
            process = await ServiceProcess.start("gateway", [])
            async with asyncio.timeout(DEADLINE_S):
                assert await process.ended == 0
            os.set_blocking(reading, False)
            said = os.read(reading, 1 << 16)
            os.close(reading)  # so that what waits is dropped at once
    assert said.startswith(b"0 xxx")
