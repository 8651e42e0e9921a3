"""Tokenizer, streaming detokenisation, stop strings and chat templates, on tokenizers made here."""

import json

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from kvkeeper.engine_service.model.checkpoint.errors import ModelConfigError, ModelFileMissingError, TokenizerError
from kvkeeper.engine_service.outputs.tokenizer import Detokenizer, StopStrings, Tokenizer

CORPUS = ["the quick brown fox", "naïve façade", "日本語のテキスト", "👩‍👩‍👧 family", "  spaces  and\nlines "] * 4
SPECIAL = ["<s>", "</s>", "<|eot|>"]


def byte_level():
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen: every byte is a token, so characters split."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback():
    """SentencePiece-style BPE, as of Llama 2 and Mistral: a prefix space, and bytes for unknown characters."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz."]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<s>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


BACKENDS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


@pytest.fixture(params=BACKENDS)
def folder(request, tmp_path):
    BACKENDS[request.param].save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    return Tokenizer.load(folder)


def loaded(name, settings=None):
    return Tokenizer(BACKENDS[name], settings or {}, frozenset())


def stream(tokenizer, ids, prompt_ids=(), **options):
    detokenizer = Detokenizer(tokenizer, prompt_ids, **options)
    return [*(detokenizer.add_token(i) for i in ids), detokenizer.flush()]


TEXT = st.text(st.one_of(st.sampled_from("ab .é日👩\u200d👧\n"), st.characters(exclude_categories=["Cs"])), max_size=24)


@settings(deadline=None)
@given(TEXT, st.sampled_from(sorted(BACKENDS)))
def test_pieces_are_whole_characters_and_spell_the_text(text, name):
    tokenizer = loaded(name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    for piece in pieces[:-1]:
        assert "\ufffd" not in piece or "\ufffd" in text
        piece.encode("utf-8")


@settings(deadline=None)
@given(TEXT, TEXT)
def test_output_continues_its_prompt(prompt, output):
    """Wherever the cut is, within a character too, the pieces are what the prompt lacks."""
    assume("\ufffd" not in prompt + output)
    for name in BACKENDS:
        tokenizer = loaded(name)
        ids = tokenizer.encode(prompt + "x" + output)
        for cut in range(1, len(ids)):
            shown = next(text for n in range(cut, -1, -1) if (text := tokenizer.decode(ids[:n]))[-1:] != "\ufffd")
            assert shown + "".join(stream(tokenizer, ids[cut:], ids[:cut])) == prompt + "x" + output


@settings(deadline=None)
@given(st.lists(st.integers(0, 400), max_size=40), st.sampled_from(sorted(BACKENDS)))
def test_any_ids_give_valid_text_and_bounded_work(ids, name):
    """Junk, special tokens and ids that do not exist: nothing raises, and what is kept stays small."""
    detokenizer = Detokenizer(loaded(name))
    for token_id in ids * 3:
        detokenizer.add_token(token_id).encode("utf-8")
        assert len(detokenizer._pending) <= 8
        assert len(detokenizer._context) <= 9
    detokenizer.flush().encode("utf-8")


def test_text_after_junk_is_right():
    tokenizer = loaded("byte_level")
    (junk,) = {i for i in range(tokenizer.vocab_size) if BACKENDS["byte_level"].id_to_token(i) == "Ģ"}  # byte 0x80
    pieces = stream(tokenizer, [junk] * 30 + tokenizer.encode("日 ok"))
    assert "".join(pieces) == "\ufffd" * 30 + "日 ok"
    assert any(pieces[:30])


def test_an_incomplete_character_is_held_until_the_end():
    tokenizer = loaded("byte_level")
    ids = tokenizer.encode("🦊")
    assert len(ids) > 1
    assert stream(tokenizer, ids[:-1])[:-1] == [""] * (len(ids) - 1)
    assert stream(tokenizer, ids[:-1])[-1] == "\ufffd"


def test_special_tokens_are_skipped_or_shown():
    for name in BACKENDS:
        tokenizer = loaded(name)
        ids = tokenizer.encode("a<|eot|> b")
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
        assert "<|eot|>" not in tokenizer.decode(ids)
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        assert "".join(stream(tokenizer, ids, skip_special_tokens=False)) == shown
        assert "<|eot|>" in shown


def test_special_tokens_around_a_text_are_optional(folder):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    bare = tokenizer.encode("a b", add_special_tokens=False)
    assert tokenizer.encode("a b") == [0, *bare]


def test_eos_ids_come_from_the_first_file_that_has_them(folder):
    def eos():
        return Tokenizer.load(folder).eos_ids

    assert eos() == frozenset()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert eos() == {1}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot|>"}))
    assert eos() == {2}
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert eos() == {7}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 0]}))
    assert eos() == {8, 0}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "8"}))
    with pytest.raises(ModelConfigError, match="eos_token_id"):
        eos()


def test_what_is_missing_or_malformed(folder, tmp_path):
    with pytest.raises(ModelFileMissingError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path / "nowhere")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="tokenizer_config"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="malformed"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(TokenizerError, match=r"^tokenizer\.json is a pointer of git-lfs, not the file itself"):
        Tokenizer.load(folder)


def test_text_that_is_no_unicode_is_refused(tokenizer):
    with pytest.raises(TokenizerError, match="Unicode"):
        tokenizer.encode("a\ud800")


def run_stops(stops, pieces):
    """Text given out, and the stop string found."""
    matcher, out = StopStrings(stops), []
    for piece in pieces:
        match = matcher.add_piece(piece)
        out.append(match.text)
        if match.stop is not None:
            return "".join(out), match.stop
    return "".join([*out, matcher.flush()]), None


def naive_stops(stops, text):
    """Character by character: the first stop string that is complete, of several the longest."""
    for end in range(1, len(text) + 1):
        if done := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=8),
)
def test_stop_strings_are_found_wherever_the_pieces_are_cut(stops, pieces):
    assert run_stops(stops, pieces) == naive_stops(stops, "".join(pieces))


def test_only_a_possible_beginning_is_held_back():
    matcher = StopStrings(["STOP", "\n\n"])
    assert [matcher.add_piece(piece).text for piece in ("abc", "S", "TO", "x", "\n", "y")] == [
        "abc",
        "",
        "",
        "STOx",
        "",
        "\ny",
    ]
    assert matcher.flush() == ""


def test_chat_template_renders_in_a_sandbox():
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'odd' %}{{ raise_exception('no ' + m.role) }}{% endif %}\n"
        "[{{ m['role'] }}]{{ m['content'] | tojson }}{% endfor %}\n"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = loaded("byte_level", {"chat_template": template, "special_tokens": {"bos_token": "<s>"}})
    messages = [{"role": "user", "content": "<é>"}]
    assert tokenizer.apply_chat_template(messages) == '<s>[user]"<é>"[assistant]'
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == '<s>[user]"<é>"'
    with pytest.raises(TokenizerError, match="no odd"):
        tokenizer.apply_chat_template([{"role": "odd"}])


@pytest.mark.parametrize(
    "template", [None, 3, "{% if", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_cannot_be_used_is_an_error(template):
    with pytest.raises(TokenizerError):
        loaded("byte_level", {"chat_template": template}).apply_chat_template([])


def test_the_response_template_is_that_of_the_config(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"response_template": {"fields": {"content": {}}}}))
    tokenizer = Tokenizer.load(folder)
    assert json.loads(tokenizer.response_template) == {"fields": {"content": {}}}
    assert Tokenizer.from_state(tokenizer.state()).response_template == tokenizer.response_template
    (folder / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.load(folder).response_template == ""


def test_template_by_name_and_from_its_own_file(folder):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.load(folder).apply_chat_template([]) == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(folder).apply_chat_template([]) == "file"
