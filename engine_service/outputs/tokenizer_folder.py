"""Reads the tokenizer of a model folder as transformers does: tokenizer.json, and what the files beside it add to it.

The files beside it name special tokens, declare tokens that tokenizer.json may lack or describe otherwise, and hold the chat
templates. A token that is new gets the next id, as in transformers, whatever id its file says.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from ..model.checkpoint.errors import ModelConfigError, ModelFileMissingError, TokenizerError
from ..model.checkpoint.json_file import POINTER_SAID, is_pointer, read_json_object
from ..model.checkpoint.text_part import unwrap

_CONFIG, _TOKENS_MAP, _ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_EOS_FILES: Final = ("generation_config.json", "config.json")
_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ATTRIBUTES: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of a token, each a bool


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """What the files say.

    Attributes:
        chat_template: one template, or several by name or as a list of names with templates; None: none.
        response_template: how the model writes thoughts and calls, for transformers' ResponseParser; None: not said.
        special_tokens: the text of each special token that has a name, such as bos_token; no others.
        eos_ids: ids that end a sequence, from the first file that has them.
    """

    backend: tokenizers.Tokenizer
    chat_template: object
    response_template: object
    special_tokens: dict[str, str]
    eos_ids: frozenset[int]


def read_tokenizer(folder: Path) -> FolderTokenizer:
    """The tokenizer of a model folder.

    Raises:
        ModelFileMissingError: no tokenizer.json.
        TokenizerError: tokenizer.json is malformed.
        ModelConfigError: a config is malformed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileMissingError(str(path))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        said = POINTER_SAID if is_pointer(path.read_bytes()) else f"is malformed: {error}"
        raise TokenizerError(f"tokenizer.json {said}") from error
    backend.no_truncation()
    backend.no_padding()
    config = _read_optional(folder / _CONFIG)
    declared: list[AddedToken]
    if (listed := config.get("added_tokens_decoder")) is not None:
        named, others = _special_tokens(config, _CONFIG)
        declared = _listed_by_id(listed)
    else:
        named, others = _special_tokens(config | _read_optional(folder / _TOKENS_MAP), _TOKENS_MAP)
        declared = list(_added_tokens(folder, backend, {token.content for token in (*named.values(), *others)}))
    _declare(backend, declared, list(named.values()), others)
    special_tokens = {name: token.content for name, token in named.items()}
    eos_ids = _eos_ids(folder, backend, special_tokens.get("eos_token"))
    templates = _chat_template(folder, config), config.get("response_template")
    return FolderTokenizer(backend, *templates, special_tokens, eos_ids)


def _declare(
    backend: tokenizers.Tokenizer, declared: list[AddedToken], named: list[AddedToken], others: list[AddedToken]
) -> None:
    """Add the declared tokens in their order, then the special ones that are none of these and none of the backend's own.

    A token that the backend has keeps its id and gets the attributes that are declared here.
    """
    names = {token.content for token in named}
    for token in declared:
        token.special = token.special or token.content in names
    known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *declared)}
    backend.add_tokens([*declared, *(token for token in (*named, *others) if token.content not in known)])


def _special_tokens(config: Mapping[str, Any], file: str) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """The special tokens by name, as transformers orders them, and those without a name."""
    others = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    found = {name: config[name] for name in _NAMES if config.get(name) is not None}
    found |= {
        name: value
        for name, value in config.items()
        if name.endswith("_token") and name not in _NAMES and _get_text(value) is not None
    }
    if isinstance(others, Mapping):
        found |= others
        others = []
    if not isinstance(others, list):
        raise ModelConfigError(file, f"extra_special_tokens must be a list or an object, is {others!r}")
    named = {name: _token(value, file, special=True) for name, value in found.items()}
    for token in named.values():
        token.special = True
    return named, [_token(value, file, special=True) for value in others]


def _listed_by_id(tokens: object) -> list[AddedToken]:
    """The tokens of added_tokens_decoder, in the order of their ids."""
    if not isinstance(tokens, Mapping) or not all(key.isdecimal() for key in tokens):
        raise ModelConfigError(_CONFIG, "added_tokens_decoder must hold tokens by id")
    return [_token(value, _CONFIG) for _, value in sorted(tokens.items(), key=lambda entry: int(entry[0]))]


def _added_tokens(folder: Path, backend: tokenizers.Tokenizer, special: set[str]) -> Iterator[AddedToken]:
    """The tokens of added_tokens.json, in the order of their ids, without those whose id a token of tokenizer.json has."""
    added = _read_optional(folder / _ADDED_TOKENS)
    if not all(isinstance(token_id, int) for token_id in added.values()):
        raise ModelConfigError(_ADDED_TOKENS, "must hold ids by token")
    own = backend.get_added_tokens_decoder()
    for content, token_id in sorted(added.items(), key=lambda entry: entry[1]):
        if token_id not in own:
            yield AddedToken(content, special=content in special)


def _token(value: object, file: str, **default: bool) -> AddedToken:
    """A token is written as its text, or as an object with its content and attributes."""
    text = _get_text(value)
    if text is None:
        raise ModelConfigError(file, f"a token must be a text, or an object with its content, is {value!r}")
    given = {name: value[name] for name in _ATTRIBUTES if name in value} if isinstance(value, Mapping) else {}
    if not all(isinstance(attribute, bool) for attribute in given.values()):
        raise ModelConfigError(file, f"{', '.join(_ATTRIBUTES)} of a token must be true or false: {value!r}")
    return AddedToken(text, **{**default, **given})


def _get_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def find_template(source: object, name: str) -> str:
    """The template of that name, or the default. source: as ChatTemplate takes it. Raises TokenizerError."""
    if isinstance(source, Sequence) and not isinstance(source, str):
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
    if isinstance(source, Mapping):
        if source and "default" not in source and name not in source:
            raise TokenizerError("the model has several chat templates, and none is called default")
        source = source.get(name, source.get("default"))
    if not isinstance(source, str):
        raise TokenizerError("the model has no chat template")
    return source


def _chat_template(folder: Path, config: Mapping[str, Any]) -> object:
    """Files of templates go before the config."""
    single, several = folder / "chat_template.jinja", folder / "additional_chat_templates"
    found = {"default": single} if single.is_file() else {}
    found |= _by_name(several.glob("*.jinja") if several.is_dir() else ())
    templates = {name: path.read_bytes().decode(errors="replace") for name, path in found.items()}
    return templates or config.get("chat_template")


def _by_name(paths: Iterable[Path]) -> dict[str, Path]:
    return {path.name.removesuffix(".jinja"): path for path in sorted(paths)}


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> frozenset[int]:
    for name in _EOS_FILES:
        found = unwrap(_read_optional(folder / name)).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                raise ModelConfigError(name, f"eos_token_id must be a token id or a list of them, is {found!r}")
            return frozenset(ids)
    token_id = None if eos_token is None else backend.token_to_id(eos_token)
    return frozenset() if token_id is None else frozenset((token_id,))


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
