"""`kvkeeper generate` of a request that a time limit cut short: its text, what ended it, and an exit code that says so."""

import pytest

from kvkeeper.cli import main
from kvkeeper.client import OutputChunk, Usage


class Cut:
    """A generation that gives one chunk and then ends for a reason."""

    request_id, usage = "mine", Usage(3, 0, 1, 0, 0)

    def __init__(self, reason: str) -> None:
        self.chunks = [OutputChunk(0, "so far", (5,), None), OutputChunk(0, "", (), reason)]

    def __enter__(self) -> "Cut":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.chunks)


@pytest.mark.parametrize(("reason", "code"), [("timed_out", 1), ("stalled", 1), ("length", 0)])
def test_what_came_is_printed_and_the_exit_code_tells_the_rest(
    reason: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvkeeper.cli.generation.generate.EngineClient.generate", lambda *_: Cut(reason))
    assert main(["generate", "x", "--timeout-ms", "50"]) == code
    printed = capsys.readouterr()
    assert printed.out == "so far\n"
    assert f"finish: {reason.replace('_', ' ')}" in printed.err
    assert ("cut short by --timeout-ms 50" in printed.err) == (reason == "timed_out")
