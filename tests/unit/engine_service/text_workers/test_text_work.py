"""TextWork: what a worker refuses names the limit, no template runs here, and no kind of tokenizer keeps a model out."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.outputs import chat_template
from kvkeeper.engine_service.outputs.conversation import Chat
from kvkeeper.engine_service.outputs.model_text import ModelText
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from kvkeeper.engine_service.text_workers.text_work import TextWork
from kvkeeper.engine_service.text_workers.text_worker import Limits
from kvkeeper.engine_service.values.errors import Draining, EngineError, InvalidField, TooComplex
from kvkeeper.engine_service.values.request import InputLimits

LIMITS = Limits(20.0, 512 << 20)
MANY = 1 << 20  # tokens
CHAT = [{"role": "user", "content": "hello"}]
LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@asynccontextmanager
async def text_work(tokenizer: Tokenizer, limits: Limits = LIMITS) -> AsyncIterator[TextWork]:
    work = TextWork(ModelText(tokenizer), tokenizer.vocab_size, 1, limits, InputLimits(), 8)
    try:
        yield work
    finally:
        await work.close()


def templated(source: str) -> Tokenizer:
    """A small tokenizer with a chat template."""
    backend = tokenizers.Tokenizer(models.BPE({letter: place for place, letter in enumerate("helo")}, []))
    backend.decoder, backend.pre_tokenizer = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(backend, {"chat_template": source}, frozenset())


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (Limits(0.02, 512 << 20), {"exceeded": "time", "limit": "0.02", "flag": "--text-seconds"}),
        (Limits(20.0, 4 << 20), {"exceeded": "memory", "limit": str(4 << 20), "flag": "--text-memory"}),
    ],
    ids=["time", "memory"],
)
async def test_a_limit_of_the_workers_is_named(limits: Limits, told: dict[str, str]) -> None:
    async with text_work(Tokenizer.load(DEMO_MODEL_DIR), limits) as work:
        with pytest.raises(TooComplex) as refused:
            await work.encode("a", "def main():\n    return 'a text that is long'\n" * 20_000, "text", MANY)
    assert refused.value.metadata == {"field": "text", **told}


async def test_no_template_runs_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one of the shortest chats."""
    made = list[object]()
    monkeypatch.setattr(chat_template.ChatTemplate, "__init__", lambda self, source: made.append(source))
    async with text_work(templated("{{ messages[0].content }}")) as work:
        assert np.array(await work.encode_chat("a", Chat(CHAT), MANY)).tolist() == [0, 1, 2, 2, 3]
        assert np.array(await work.encode_chat("a", Chat(CHAT * 100), MANY)).tolist() == [0, 1, 2, 2, 3]
    assert made == []


TIME = {"exceeded": "time", "limit": "1.0", "flag": "--text-seconds"}
MEMORY = {"exceeded": "memory", "limit": str(512 << 20), "flag": "--text-memory"}
RENDERED: list[tuple[str, type[EngineError], dict[str, str]]] = [
    (LOOP, TooComplex, TIME),
    ("{{ 'a' * 2 ** 40 }}", TooComplex, MEMORY),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", TooComplex, {"exceeded": "depth"}),
    ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", TooComplex, {"exceeded": "depth"}),
    ("{{ raise_exception('no') }}", InvalidField, {}),
    ("{{ raise_exception('\\ud800' * 5000) }}", InvalidField, {}),
    ("{{ ''.__class__.__mro__ }}", InvalidField, {}),
    ("{{ 1 / 0 }}", InvalidField, {}),
    ("{{ 1 + 'a' }}", InvalidField, {}),
    ("{{ (2.0 ** 1000) ** 2 }}", InvalidField, {}),
    ("{{ range(1000000) }}", InvalidField, {}),
    ("{{ messages[7].content.x }}", InvalidField, {}),
    ("{{ 'é'.encode('ascii') }}", InvalidField, {}),
    ("{{ '\\ud800' }}", InvalidField, {}),
    ("{{ 'a' | xmlattr }}", InvalidField, {}),
    ("{% include 'a' %}", InvalidField, {}),
]


async def test_whatever_a_template_does_is_refused_by_name_and_the_next_chat_is_served() -> None:
    cases = "".join(f"{{% elif which == '{place}' %}}{case[0]}" for place, case in enumerate(RENDERED))
    whole = "{% set which = messages[0].content %}{% if which == 'hello' %}hello" + cases + "{% endif %}"
    async with text_work(templated(whole), Limits(1.0, 512 << 20)) as work:
        for place, (template, error, told) in enumerate(RENDERED):
            with pytest.raises(error) as refused:
                await work.encode_chat("a", Chat([{"role": "user", "content": str(place)}]), MANY)
            assert (type(refused.value), refused.value.metadata) == (error, {"field": "chat", **told}), template
            assert len(str(refused.value).encode()) < 300, "one line that every message can hold"
            assert np.array(await work.encode_chat("a", Chat(CHAT), MANY)).tolist() == [0, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("template", "error", "told"),
    [
        ("{{ 9 ** (9 ** 9) }}", TooComplex, TIME),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", TooComplex, {"exceeded": "depth"}),
        ("{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}", InvalidField, {}),
        ("{% if", InvalidField, {}),
    ],
    ids=["time", "depth", "code", "syntax"],
)
async def test_a_template_that_does_not_compile_is_refused_by_name(
    template: str, error: type[EngineError], told: dict[str, str]
) -> None:
    async with text_work(templated(template), Limits(1.0, 512 << 20)) as work:
        with pytest.raises(error) as refused:
            await work.encode_chat("a", Chat(CHAT), MANY)
        assert (type(refused.value), refused.value.metadata) == (error, {"field": "chat", **told})
        assert np.array(await work.encode("a", "hello", "text", MANY)).tolist() == [0, 1, 2, 2, 3]


async def test_what_is_wrong_in_a_chat_is_named_and_the_next_chat_is_served() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{"}}]
    wrong = {
        "chat.tools": Chat(CHAT, tools="x"),
        "chat.template_arguments": Chat(CHAT, template_arguments="[]"),
        "chat.messages[0].tool_calls[0].arguments": Chat([{"role": "assistant", "tool_calls": calls}]),
    }
    async with text_work(templated("hello"), Limits(1.0, 512 << 20)) as work:
        for field, chat in wrong.items():
            with pytest.raises(InvalidField, match=re.escape(field)) as refused:
                await work.encode_chat("a", chat, MANY)
            assert refused.value.metadata == {"field": field}
            assert np.array(await work.encode_chat("a", Chat(CHAT), MANY)).tolist() == [0, 1, 2, 2, 3]
        with pytest.raises(TooComplex) as too_deep:
            await work.encode_chat("a", Chat(CHAT, tools="[" * 100_000), MANY)
        assert too_deep.value.metadata == {"field": "chat", "exceeded": "depth"}


async def test_all_texts_of_a_chat_count() -> None:
    calls = [{"id": "i" * 50, "type": "function", "function": {"name": "f" * 50, "arguments": "a" * 50}}]
    said = {"role": "assistant", "content": "c" * 50, "name": "n" * 50, "tool_call_id": "t" * 50, "tool_calls": calls}
    chat = Chat([said], tools="o" * 50, template_arguments="v" * 50)
    work = TextWork(ModelText(templated("")), 8, 1, LIMITS, InputLimits(text_bytes=399), 8)
    try:
        with pytest.raises(InvalidField, match="at most 399 bytes, not 400") as refused:
            await work.encode_chat("a", chat, MANY)
    finally:
        await work.close()
    assert refused.value.metadata == {"field": "chat", "limit": "399", "flag": "--max-text-bytes"}


async def test_a_chat_with_plain_text_is_encoded_in_a_worker_too() -> None:
    tokenizer = templated("<x>{{ messages[0].content }}")
    tokenizer._backend.add_special_tokens(["<x>"])
    async with text_work(tokenizer) as work:
        for plain, ids in ((False, [4, 0, 4, 1]), (True, [4, 0, 1])):  # the letters of <x> have no token
            chat = Chat([{"role": "user", "content": "h<x>e"}], plain_user_text=plain)
            assert np.array(await work.encode_chat("a", chat, MANY)).tolist() == ids


async def test_a_short_chat_waits_for_no_long_text() -> None:
    template = "{% if messages[0].content | length > 9999 %}" + LOOP + "{% endif %}hello"
    async with text_work(templated(template), replace(LIMITS, cpu_s=2.0)) as work:
        long = asyncio.create_task(work.encode_chat("a", Chat([{"role": "user", "content": "h" * 10_000}]), MANY))
        await asyncio.sleep(0)
        await work.encode_chat("b", Chat(CHAT), MANY)
        assert not long.done(), "it ends at its limit alone"
        with pytest.raises(TooComplex):
            await long


async def test_a_closed_one_refuses_chats_that_are_under_way_and_later_ones() -> None:
    async with text_work(templated(LOOP)) as work:
        chats = [asyncio.create_task(work.encode_chat("a", Chat(CHAT), MANY)) for _ in range(3)]
        await asyncio.sleep(0)
        await work.close()
        for chat in (*chats, work.encode_chat("a", Chat(CHAT), MANY)):
            with pytest.raises(Draining):
                await asyncio.wait_for(chat, 60)


async def test_a_model_without_a_tokenizer_refuses_chats() -> None:
    work = TextWork(ModelText(None), 8, 1, LIMITS, InputLimits(), 8)
    with pytest.raises(InvalidField, match="no tokenizer") as refused:
        await work.encode_chat("a", Chat(CHAT), MANY)
    assert refused.value.metadata == {"field": "chat"}


def _word_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def _pieces() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return made


def _unigram() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0), ("?", -3.0)], unk_id=2))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.Metaspace()
    return made


@pytest.mark.parametrize("make", [_word_level, _pieces, _unigram])
async def test_a_model_is_served_whose_tokenizer_constraints_cannot_use(make: object) -> None:
    assert callable(make)
    async with text_work(Tokenizer(make(), {"chat_template": "{{ messages[0].content }}"}, frozenset({2}))) as work:
        assert np.array(await work.encode("a", "a b", "text", MANY)).tolist() == [0, 1]
        assert np.array(await work.encode_chat("a", Chat([{"role": "user", "content": "b a"}]), MANY)).tolist() == [1, 0]
        assert await work.decode("a", np.array([1], np.int32), with_added=False) == "b"
        with pytest.raises(
            InvalidField, match="cannot be constrained, for its tokenizer: can't determine decoder type"
        ) as refused:
            await work.constraint("a", "regex", "a+")
    assert refused.value.metadata == {"field": "sampling.regex"}


async def test_tokens_that_the_model_cannot_draw_keep_no_constraint_from_it() -> None:
    tokenizer = templated("")
    tokenizer._backend.add_special_tokens(["<pad>", "<mask>"])
    work = TextWork(ModelText(Tokenizer(tokenizer._backend, {}, frozenset({3}))), 5, 1, LIMITS, InputLimits(), 8)
    try:
        allowed = (await work.constraint("a", "regex", "h")).allowed()
        assert np.flatnonzero(allowed).tolist() == [0]
    finally:
        await work.close()
