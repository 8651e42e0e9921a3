"""Frames come out as they went in, wherever the bytes were cut; columns that do not fit together are refused."""

import pytest

from kvkeeper.common.trust.caller import Caller, Role
from kvkeeper.engine_service.rpc.fronts.frames import FrameReader, Kind, PartColumns, frame, parts_of
from kvkeeper.engine_service.rpc.fronts.told import Admitted, FrontState, Told, error_of, error_to_bytes
from kvkeeper.engine_service.values.errors import NeverFits

SENT = [(Kind.STOPPED, 1, b"12345678"), (Kind.MESSAGE, 2**63, b"x" * 300), (Kind.END, 7, b"")]


@pytest.mark.parametrize("step", [1, 2, 13, 1000])
def test_frames_come_out_whole_wherever_bytes_are_cut(step: int) -> None:
    raw = b"".join(frame(*each) for each in SENT)
    reader = FrameReader()
    found = [each for first in range(0, len(raw), step) for each in reader.add(raw[first : first + step])]
    assert found == SENT


def test_a_kind_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="99"):
        list(FrameReader().add(frame(99, 1, b"")))  # type: ignore[arg-type]


def test_columns_of_plain_tokens() -> None:
    parts = PartColumns()
    sent = [(1, [5, 6, 7]), (2**40, [2**31]), (3, [])]
    for number, token_ids in sent:
        parts.add(number, token_ids)
    assert parts.num_tokens == 4
    assert list(parts_of(parts.to_bytes())) == sent


@pytest.mark.parametrize("cut", [4, 8])
def test_columns_that_do_not_fit_together_are_refused(cut: int) -> None:
    parts = PartColumns()
    parts.add(1, [5, 6, 7])
    with pytest.raises(ValueError, match="different lengths"):
        list(parts_of(parts.to_bytes()[:-cut]))


def test_a_call_is_told_with_its_caller_and_trace() -> None:
    told = Told("/service/Method", Caller("näme", "tenant", Role.CLIENT), "ipv4:1.2.3.4:5", (("traceparent", "00-1"),))
    assert Told.split(told.with_message(b"\0message")) == (told, b"\0message")


def test_states_admissions_and_errors_are_told_whole() -> None:
    state, admitted = FrontState(is_serving=True, is_leaving=False, max_len=9), Admitted("id", True, [1, 2])
    assert FrontState.of(state.to_bytes()) == state
    assert Admitted.of(admitted.to_bytes()) == admitted
    told = error_of(error_to_bytes(NeverFits("too long", requested=9, limit=8)))
    assert (told.reason, str(told), told.metadata) == ("NEVER_FITS", "too long", {"requested": "9", "limit": "8"})
