"""What the files beside tokenizer.json add to it, held to transformers: declared tokens, special tokens, their attributes."""

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from kvkeeper.engine_service.model.checkpoint.errors import ModelConfigError
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer

TEXTS = [
    "a b",
    "<s>a</s>",
    "a <new> b",
    "a<new>b",
    "A<New>B",
    "x <tool> <pad>y",
    "<old>a <old> b",
    "<v>",
    "<i>a<j>",
    "[PAD]<m>",
]


def token(content: str, **attributes: bool) -> dict[str, object]:
    return {
        "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False,
        **attributes,
    }  # fmt: skip


def write(folder: Path, config: dict[str, object], **files: object) -> Path:
    """A small tokenizer, in whose vocabulary <v> is, of whose added tokens <old> is the last, and which knows no <new>."""
    vocabulary = {letter: place for place, letter in enumerate([*"abxyv<>/sAB▁", "<v>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], fuse_unk=True))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True), AddedToken("<old>", lstrip=True)])
    backend.save(str(folder / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({}, {}),
        ({"added_tokens_decoder": {"16": token("<new>"), "17": token("<tool>", special=True)}}, {}),
        ({"added_tokens_decoder": {"17": token("<tool>", lstrip=True), "16": token("<new>", rstrip=True)}}, {}),
        ({"added_tokens_decoder": {"16": token("<tool>"), "9": token("<new>")}}, {}),
        ({"added_tokens_decoder": {"30": token("<new>"), "20": token("<tool>")}}, {}),
        ({"added_tokens_decoder": {"16": token("<new>", normalized=True, single_word=True)}}, {}),
        ({"added_tokens_decoder": {"15": token("<old>", special=True, lstrip=True)}}, {}),
        ({"added_tokens_decoder": {"12": token("<v>", special=True)}}, {}),
        ({"added_tokens_decoder": {"16": token("<pad>")}, "pad_token": "<pad>"}, {}),
        ({"added_tokens_decoder": {}, "pad_token": "[PAD]"}, {}),
        ({"pad_token": "<v>"}, {}),
        ({"pad_token": token("<pad>", lstrip=True) | {"__type": "AddedToken"}}, {}),
        ({"image_token": "<i>", "mask_token": "<m>"}, {}),
        ({"additional_special_tokens": ["<i>", "<j>"]}, {}),
        ({"extra_special_tokens": ["<i>"], "additional_special_tokens": ["<j>"]}, {}),
        ({"extra_special_tokens": {"image_token": "<i>"}}, {}),
        ({}, {"special_tokens_map": {"pad_token": token("<pad>"), "additional_special_tokens": ["<i>"]}}),
        ({}, {"added_tokens": {"<new>": 16, "<tool>": 17}}),
        ({"pad_token": "<pad>"}, {"added_tokens": {"<tool>": 18, "<new>": 16, "<pad>": 17, "<old>": 15}}),
        ({"additional_special_tokens": ["<tool>"]}, {"added_tokens": {"<new>": 16, "<tool>": 17}}),
        ({"added_tokens_decoder": {"16": token("<new>")}}, {"added_tokens": {"<tool>": 17}}),
    ],
)
def test_tokens_are_those_of_transformers(config: dict[str, object], files: dict[str, object], tmp_path: Path) -> None:
    write(tmp_path, config, **files)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    assert {text: ours.encode(text) for text in TEXTS} == {text: theirs.encode(text) for text in TEXTS}
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for skips in (True, False):
            ids = ours.encode(text)
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips), text
    again = Tokenizer.from_state(json.loads(json.dumps(ours.state())))
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_a_declared_token_is_one_token(tmp_path: Path) -> None:
    whole = Tokenizer.load(write(tmp_path, {"added_tokens_decoder": {"16": token("<new>")}}))
    assert whole.encode("<new>") == [16]
    assert whole.decode([16]) == "<new>"


def test_the_end_of_a_sequence_may_be_named_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = write(tmp_path, {"eos_token": None}, special_tokens_map={"eos_token": token("<old>")})
    assert Tokenizer.load(folder).eos_ids == {15}


@pytest.mark.parametrize(
    ("config", "files", "told"),
    [
        ({"added_tokens_decoder": ["<new>"]}, {}, "tokenizer_config.json: added_tokens_decoder"),
        ({"added_tokens_decoder": {"x": token("<new>")}}, {}, "tokenizer_config.json: added_tokens_decoder"),
        ({"added_tokens_decoder": {"16": {"lstrip": True}}}, {}, "tokenizer_config.json: a token"),
        ({"added_tokens_decoder": {"16": token("<new>") | {"special": 3}}}, {}, "tokenizer_config.json: .*true or false"),
        ({"bos_token": 3}, {}, "a token must be a text"),
        ({"extra_special_tokens": "x"}, {}, "extra_special_tokens"),
        ({}, {"added_tokens": {"<new>": "16"}}, "added_tokens.json"),
        ({}, {"special_tokens_map": ["<s>"]}, "special_tokens_map.json"),
    ],
)
def test_what_is_malformed_is_named(config: dict[str, object], files: dict[str, object], told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=told):
        Tokenizer.load(write(tmp_path, config, **files))
