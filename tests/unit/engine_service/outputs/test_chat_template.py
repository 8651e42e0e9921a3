"""Chat templates are rendered as transformers' apply_chat_template renders them: kinds of templates, and those of families."""

import datetime as time_module
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models

from kvkeeper.engine_service.model.checkpoint.errors import TokenizerError
from kvkeeper.engine_service.outputs import chat_template
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer

FAMILIES = Path(__file__).parents[4] / "tests" / "support" / "models" / "chat_templates"
CHATS = {
    "question": [("user", "How do I read a file?")],
    "system": [("system", " You are <brief> & \"exact\". "), ("user", "  naïve café — 日本語 🙂\n")],
    "turns": [("user", "a"), ("assistant", "b"), ("user", "c")],
    "system and turns": [
        ("system", "s /no_think"), ("user", "{{ 1 }}"), ("assistant", " <think>\nh\n</think>\n\nb\n"), ("user", "c"),
    ],
    "answered": [("user", "a"), ("assistant", "<think>x</think> b ")],
    "two systems": [("system", "s"), ("system", "t"), ("user", "a")],
    "out of turn": [("assistant", "b"), ("user", "a")],
    "empty": [("user", "")],
}  # fmt: skip
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "image_token": "<image>"}

KINDS = {
    "time": "{{ strftime_now('%d %b %Y') }}",
    "time is defined": "{% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d %H:%M:%S') }}{% else %}none{% endif %}",
    "time of another form": "{{ strftime_now('%A, %-d. %B %Y %% %p') }}",
    "time without a form": "{{ strftime_now() }}",
    "time of a wrong form": "{{ strftime_now(3) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "generation with blanks": "a\n  {%- generation -%}\n  {{ messages[0].content }}  {%- endgeneration %}\n b",
    "generation hides names": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "generation in generation": "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
    "generation without an end": "{% generation %}a",
    "break in generation": "{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
    "tools is none": "{% if tools is not none %}You have tools: {{ tools }}{% else %}none{% endif %}",
    "tools are defined": "{{ tools is defined }} {{ tools is none }} {{ documents is defined }} {{ documents is none }}",
    "tools are set": "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}{{ documents }}",
    "other variables are not defined": "{{ xml_tools is defined }}{{ enable_thinking is defined }}{{ date_string }}",
    "json": "{{ messages | tojson }}",
    "json by default": "{{ {'b': '<é&\\'>', 'a': [1, none, true, 1.5]} | tojson }}",
    "json in ascii": "{{ messages[0] | tojson(ensure_ascii=True) }}",
    "json as it is": "{{ messages[0] | tojson(ensure_ascii=False) }}",
    "json indented": "{{ messages | tojson(indent=4) }}",
    "json indented by place": "{{ messages | tojson(True, 2) }}",
    "json packed": "{{ messages | tojson(separators=(',', ':')) }}",
    "json sorted": "{{ {'b': 1, 'a': {'d': 2, 'c': 3}} | tojson(sort_keys=true) }}",
    "json with all": "{{ messages | tojson(ensure_ascii=false, indent=1, separators=(';', '='), sort_keys=true) }}",
    "json of what is none": "{{ undefined_name | tojson }}",
    "raise": "{{ raise_exception('no ' + messages[0].role) }}",
    "raise in turn": "{% if messages[0].role != 'user' %}{{ raise_exception('first user') }}{% endif %}ok",
    "break": "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "blocks are trimmed": "{% for m in messages %}\n    {% if true %}\n[{{ m.role }}]\n    {% endif %}\n{% endfor %}\nend\n",
    "blocks are not trimmed": "{% for m in messages %}\n  {%+ if true %} x{% endif +%}\n{% endfor %}",
    "ends of lines": "a\r\nb\rc\n{{ 'x\r\ny' }}\n\n",
    "comments": "a {# b\n #}\n   {#- c -#}  d",
    "raw": "{% raw %}{{ messages }}{% endraw %}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}",
    "a token of the model's own": "{{ image_token }}",
    "tokens without a name": "{{ extra_special_tokens is defined }}{{ additional_special_tokens is defined }}",
    "no token for pads": "{% if pad_token is defined %}[{{ pad_token }}]{% else %}none{% endif %}{{ pad_token }}",
    "no other tokens": "{{ sep_token is defined }}{{ cls_token is defined }}{{ mask_token is defined }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "namespace of a dict": "{% set ns = namespace({'a': 1}, self=2) %}{{ ns.a }}{{ ns.self }}",
    "namespace with a hidden name": "{% set ns = namespace(_a=1) %}{{ ns._a }}",
    "namespace that gets a hidden name": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "dict": "{{ dict(a=1, b=messages[0].role) }}{{ dict([('x', 1)]).x }}",
    "dict from keys": "{{ dict.fromkeys(['a', 'b'], 0) }}",
    "dict is no class": "{{ dict.__class__ }}{{ dict.__mro__ is defined }}{{ dict.update is defined }}",
    "macro": "{% macro say(m, end='!') %}{{ m.role }}: {{ m.content }}{{ end }}{% endmacro %}{{ say(messages[0]) }}",
    "call": "{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}{{ messages[0].content }}{% endcall %}",
    "filter": "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
    "set of a block": "{% set text %}{{ messages[0].content }}{% endset %}{{ text | length }}{{ text }}",
    "with": "{% with a = messages[0].role %}{{ a }}{% endwith %}{{ a is defined }}",
    "slices": "{{ messages[1:] | length }}{{ messages[-1].content }}{{ messages[::-1][0].role }}",
    "filters of lists": "{{ messages | map(attribute='role') | join }}{{ messages | selectattr('role', 'eq', 'user') | list }}",
    "filters that choose": "{{ messages | rejectattr('role', 'in', ['user']) | list }}{{ [0] | reject('equalto', 0) | list }}",
    "filters that group": "{% for k, g in messages | groupby('role') %}{{ k }}{{ g | length }}{% endfor %}",
    "filters of text": "{{ messages[0].content | trim | upper | replace('A', 'B') | default('x', true) | indent(2, true) }}",
    "filters of dicts": "{{ messages[0] | items | list }}{{ messages[0] | dictsort }}",
    "methods of text": "{{ messages[0].content.strip().split(' ')[0].startswith('H') }}{{ '%s-%d' % ('a'.join('xy'), 3) }}",
    "methods of dicts": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0].get('name', 'n') }}",
    "tests": "{{ messages is iterable }}{{ messages[0] is mapping }}{{ 'a' is string }}{{ 1 is number }}{{ none is none }}",
    "undefined in a condition": "{% if messages[0].tool_calls %}a{% else %}b{% endif %}{{ messages[0].name }}",
    "attribute of what is undefined": "{{ messages[0].tool_calls.function }}",
    "a list is not changed": "{{ messages.append(1) }}",
    "a dict is not changed": "{{ messages[0].update({'role': 'x'}) }}",
    "classes are out of reach": "{{ ''.__class__.__mro__ }}",
    "classes are out of reach by filter": "{{ '' | attr('__class__') }}",
    "classes are out of reach by format": "{{ '{0.__class__}'.format(1) }}",
    "loop variables": "{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.previtem }}{% endfor %}",
    "recursive loop": "{% for m in messages recursive %}{{ m.role }}{{ loop([{'role': 0}]) if loop.depth < 2 }}{% endfor %}",
    "cycler": "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{% endfor %}",
    "joiner": "{% set j = joiner('|') %}{% for m in messages %}{{ j() }}{{ m.role }}{% endfor %}",
    "a filter of what it does not take": "{{ 'a' | xmlattr }}",
    "range": "{% for i in range(3) %}{{ i }}{% endfor %}",
    "a range that is too long": "{{ range(1000000) }}",
    "text beside text": "{{ 'a' ~ 1 ~ none ~ true }}{{ 'a' 'b' }}",
    "text and number": "{{ 'a' + 1 }}",
    "division by zero": "{{ 1 / 0 }}",
    "escapes are off": "{{ '<&>' }}{{ '<&>' | escape }}{{ '<b>' | safe }}",
    "not latin": "{{ '\\u00e9é日' }}{{ messages[0].content.encode('ascii') }}",
    "half a character": "{{ '\\ud800' }}",
    "a filter that is not there": "{{ messages | no_such_filter }}",
    "a tag that is not there": "{% nothing %}",
    "not closed": "{% if messages",
    "a template that is not there": "{% include 'other' %}",
    "a name of jinja's": "{{ lipsum is defined }}{{ self is defined }}{{ caller is defined }}",
    "blocks": "{% block a %}x{% endblock %}{{ self.a() }}",
    "translation is off": "{% trans %}a{% endtrans %}",
    "do is off": "{% do messages %}",
    "empty": "",
}  # fmt: skip


class Fixed(time_module.datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: time_module.tzinfo | None = None) -> "Fixed":
        return cls(2031, 2, 3, 14, 5, 6, tzinfo=tz)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)
    monkeypatch.setattr(chat_template, "datetime", Fixed)
    chat_template_utils._compile_jinja_template.cache_clear()
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    yield
    chat_template_utils._compile_jinja_template.cache_clear()


def write(folder: Path, template: object, **config: object) -> Path:
    backend = tokenizers.Tokenizer(models.BPE({letter: place for place, letter in enumerate("abc ")}, []))
    backend.add_special_tokens(["<s>", "</s>", "<unk>", "<image>"])
    backend.save(str(folder / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **TOKENS, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    return folder


def theirs(folder: Path, messages: list[dict[str, str]], **variables: Any) -> str | None:
    """None: refused."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))
    except Exception:  # a template can raise anything
        return None


def ours(folder: Path, messages: list[dict[str, str]], **variables: Any) -> str | None:
    tokenizer = Tokenizer.load(folder)
    try:
        return tokenizer.apply_chat_template(messages, **variables)
    except TokenizerError:
        return None


def chat(name: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in CHATS[name]]


def compare(folder: Path, **variables: Any) -> dict[str, str | None]:
    """What every chat becomes, on either side the same."""
    found = {}
    for name in CHATS:
        for prompts in (True, False):
            expected = theirs(folder, chat(name), add_generation_prompt=prompts, **variables)
            assert ours(folder, chat(name), add_generation_prompt=prompts, **variables) == expected, name
            found[f"{name}, {prompts}"] = expected
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_template_is_rendered_as_transformers_does(name: str, tmp_path: Path) -> None:
    compare(write(tmp_path, KINDS[name]))


@pytest.mark.parametrize("path", sorted(FAMILIES.glob("*.jinja")), ids=lambda path: path.stem)
def test_the_template_of_a_family_is_rendered_as_transformers_does(path: Path, tmp_path: Path) -> None:
    found = compare(write(tmp_path, path.read_text()))
    assert found["question, True"], "it renders a plain question"
    assert "26 Jul 2024" not in str(found), "no date is that of the template's making"


def test_what_a_caller_adds_reaches_the_template(tmp_path: Path) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
    variables = {"tools": [tool], "documents": [{"title": "t", "text": "x"}], "enable_thinking": False}
    for family in ("qwen_3", "llama_3_1", "gpt_oss", "mistral_v3", "granite_3", "command_r_7b", "glm_4", "smollm_3"):
        found = compare(write(tmp_path, (FAMILIES / f"{family}.jinja").read_text()), **variables)
        assert found["question, True"], family


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, {}),
        ({"chat_template": {"rag": "r", "default": "d"}}, {}),
        ({"chat_template": [{"name": "tool_use", "template": "t"}]}, {}),
        ({"chat_template": {}}, {}),
        ({"chat_template": None}, {}),
        ({"chat_template": "config"}, {"chat_template.jinja": "file {{ messages[0].content }}\r\n"}),
        ({"chat_template": "config"}, {"additional_chat_templates/tool_use.jinja": "t"}),
        ({"chat_template": "config"}, {"additional_chat_templates/default.jinja": "d"}),
        ({}, {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "r"}),
        ({"pad_token": "<p>"}, {"chat_template.jinja": "{{ pad_token }}"}),
        ({"pad_token": None}, {"chat_template.jinja": "{{ pad_token is defined }}"}),
        ({"bos_token": {"__type": "AddedToken", "content": "<b>"}}, {"chat_template.jinja": "{{ bos_token }}"}),
        ({"extra_special_tokens": {"eoi_token": "<i>"}}, {"chat_template.jinja": "{{ eoi_token }}"}),
        ({"additional_special_tokens": ["<i>"]}, {"chat_template.jinja": "{{ additional_special_tokens }}"}),
        ({"bos_token": None}, {"special_tokens_map.json": '{"bos_token": "<m>"}', "chat_template.jinja": "{{ bos_token }}"}),
        (
            {"added_tokens_decoder": {}, "bos_token": None},
            {"special_tokens_map.json": '{"bos_token": "<m>"}', "chat_template.jinja": "{{ bos_token is defined }}"},
        ),
    ],
)  # fmt: skip
def test_templates_and_special_tokens_are_found_where_transformers_finds_them(
    config: dict[str, object], files: dict[str, str], tmp_path: Path
) -> None:
    write(tmp_path, None, **config)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    compare(tmp_path)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('a\nb \ud800') }}", "chat template: a b ?"),
        ("{{ raise_exception('x' * 5000) }}", f"chat template: {'x' * 200}"),
        ("{{ raise_exception('') }}", "chat template: TemplateError"),
        (None, "the model has no chat template"),
        ({"a": "b"}, "the model has several chat templates, and none is called default"),
    ],
)
def test_a_refusal_is_one_short_line_that_every_message_can_hold(template: object, told: str) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    with pytest.raises(TokenizerError) as refused:
        Tokenizer(backend, {"chat_template": template}, frozenset()).apply_chat_template(chat("question"))
    assert str(refused.value) == told
