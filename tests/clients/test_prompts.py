"""What a prompt may be: text, token ids, a conversation. What it may not be is refused before anything is sent, by name."""

from typing import Any

import numpy as np
import pytest

from kvkeeper.client.engine.calls import GenerateOptions, generate_request
from kvkeeper.engine.v1 import engine_service_pb2 as pb


def asked(prompt: Any) -> pb.GenerateRequest:
    return generate_request(prompt, GenerateOptions())


def test_a_message_may_be_in_text_parts() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    request = asked([{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("system", "Be brief."), ("user", "What is this?")]


@pytest.mark.parametrize(
    "ids",
    [[3, 4, 5], (3, 4, 5), np.array([3, 4, 5], np.int32), range(3, 6), [np.int64(3), 4, 5]],
    ids=lambda v: type(v).__name__,
)
def test_token_ids_may_be_any_integers_in_order(ids: Any) -> None:
    assert list(asked(ids).token_ids.ids) == [3, 4, 5]


def test_no_token_ids_are_the_service_s_to_refuse() -> None:
    assert asked([]).WhichOneof("prompt") == "token_ids"


WRONG = {
    "image part": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        ValueError,
        "messages[0].content[0]: a part of type 'image_url'; only parts of type 'text' are taken",
    ),
    "part without text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        TypeError,
        "messages[0].content[0].text: a string, not None",
    ),
    "part that is no mapping": (
        [{"role": "user", "content": ["hello"]}],
        TypeError,
        "messages[0].content[0]: a mapping with type and text, not a str",
    ),
    "name": (
        [{"role": "system", "content": "x"}, {"role": "user", "name": "ada", "content": "x"}],
        ValueError,
        "messages[1]: a message has role and content, and no name",
    ),
    "no content": ([{"role": "user"}], ValueError, "messages[0].content is missing"),
    "null content": (
        [{"role": "assistant", "content": None}],
        TypeError,
        "messages[0].content: a string or a list of text parts, not None",
    ),
    "no role": ([{"content": "x"}], ValueError, "messages[0].role is missing"),
    "role that is no text": ([{"role": 1, "content": "x"}], TypeError, "messages[0].role: a string, not an int"),
    "one message alone": (
        {"role": "user", "content": "x"},
        TypeError,
        "a prompt is text, token ids or a list of messages, not a dict; put a single message into a list",
    ),
    "messages and ids": (
        [{"role": "user", "content": "x"}, 7],
        TypeError,
        "messages[1]: a mapping with role and content, not an int",
    ),
    "texts": (["a", "b"], TypeError, "token ids are integers, not a str; a prompt is one text, so ask once for each"),
    "fractions": ([1.0, 2.0], TypeError, "token ids are integers, not a float"),
    "two dimensions": (np.zeros((2, 2), int), TypeError, "token ids are integers, not a list"),
    "below zero": ([1, -1], ValueError, "token ids are 0 to 2^32 - 1"),
    "too large": ([2**32], ValueError, "token ids are 0 to 2^32 - 1"),
    "bytes": (b"abc", TypeError, "a prompt is text, token ids or a list of messages, not a bytes; decode it first"),
    "nothing": (None, TypeError, "a prompt is text, token ids or a list of messages, not None"),
}


@pytest.mark.parametrize(("prompt", "kind", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_prompt_is_refused_by_name(prompt: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        asked(prompt)
    assert str(caught.value) == said
