"""Constraints in a request: one reaches the service as given; of two none is dropped in silence."""

import pytest

from kvkeeper.client.engine.calls import GenerateOptions, Sampling, generate_request

GIVEN = {"json_schema": "{}", "regex": "a+", "choices": ("yes", "no")}


@pytest.mark.parametrize("name", GIVEN)
def test_one_constraint_is_sent(name: str) -> None:
    request = generate_request("x", GenerateOptions(sampling=Sampling(**{name: GIVEN[name]})))
    assert request.sampling.WhichOneof("constraint") == name


@pytest.mark.parametrize("left_out", GIVEN)
def test_two_constraints_are_refused(left_out: str) -> None:
    two = {name: value for name, value in GIVEN.items() if name != left_out}
    with pytest.raises(ValueError, match=r"one constraint at most, not .* and "):
        generate_request("x", GenerateOptions(sampling=Sampling(**two)))
