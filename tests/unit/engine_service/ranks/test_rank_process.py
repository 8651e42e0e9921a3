"""What a rank says when it fails: of a device, what the error means."""

import pytest
from structlog.testing import capture_logs

from kvkeeper.engine_service.ranks import rank_process
from tests.support.stand_ins.device_faults import accelerator_error


def told_of(error: Exception) -> dict[str, object]:
    with capture_logs() as logs:
        try:
            raise error
        except Exception as failed:
            rank_process._tell_failed(failed)
    (told,) = logs
    return dict(told)


@pytest.mark.parametrize(("number", "name"), [(2, "cudaErrorMemoryAllocation: "), (700, "cudaErrorIllegalAddress: ")])
def test_an_error_of_the_device_is_told_in_words(number: int, name: str) -> None:
    told = told_of(accelerator_error(number, ""))
    assert (told["event"], told["log_level"]) == ("rank_failed", "error")
    assert str(told["message"]).startswith(name)
    assert "exc_info" not in told


def test_a_bug_is_told_with_its_traceback() -> None:
    told = told_of(ValueError("a bug"))
    assert told["event"] == "rank_failed"
    assert told["exc_info"]
