"""Options in a request: each reaches the service as given; of two constraints none is dropped in silence."""

import pytest

from kvkeeper.client.engine.calls import GenerateOptions, Sampling, generate_request
from kvkeeper.engine.v1 import engine_service_pb2 as pb

GIVEN = {"json_schema": "{}", "regex": "a+", "choices": ("yes", "no")}


def test_each_option_is_sent_under_its_name() -> None:
    given = {"n": 2, "best_of": 3, "request_id": "r", "priority": 4, "timeout_ms": 5, "tenant": "t", "skip_look_up": True}
    given |= {"session_id": "s", "metadata": {"key": "value"}}
    request = generate_request("x", GenerateOptions(**given, reuse_hint="soon"))
    assert {name: getattr(request, name) for name in given} == given
    assert request.reuse_hint == pb.REUSE_HINT_SOON


def test_sampling_has_every_field_of_the_protocol_and_sends_it() -> None:
    given = {"logit_bias": {3: -1.5, 0: 100.0}, "min_tokens": 4, "bad_words": ("a", "b"), "allowed_token_ids": (5, 6)}
    assert set(Sampling.__dataclass_fields__) == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    sampling = generate_request("x", GenerateOptions(sampling=Sampling(**given, bad_words_token_ids=([1, 2], [3])))).sampling
    assert (dict(sampling.logit_bias), sampling.min_tokens) == (given["logit_bias"], 4)
    assert (tuple(sampling.bad_words), tuple(sampling.allowed_token_ids)) == (("a", "b"), (5, 6))
    assert [list(word.ids) for word in sampling.bad_words_token_ids] == [[1, 2], [3]]


@pytest.mark.parametrize("name", GIVEN)
def test_one_constraint_is_sent(name: str) -> None:
    request = generate_request("x", GenerateOptions(sampling=Sampling(**{name: GIVEN[name]})))
    assert request.sampling.WhichOneof("constraint") == name


@pytest.mark.parametrize("left_out", GIVEN)
def test_two_constraints_are_refused(left_out: str) -> None:
    two = {name: value for name, value in GIVEN.items() if name != left_out}
    with pytest.raises(ValueError, match=r"one constraint at most, not .* and "):
        generate_request("x", GenerateOptions(sampling=Sampling(**two)))
