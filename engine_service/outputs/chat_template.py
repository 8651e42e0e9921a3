"""ChatTemplate: a conversation as the text that a model was trained on, by the model's own template, in a sandbox.

Templates are written for transformers' apply_chat_template, so they find here what they find there: the same tags, filters,
functions and variables, each with the same defaults. A template is a program of the model folder, which may loop, recurse and
raise whatever it likes; it runs in a worker process alone (text_workers), whose limits hold for compiling it, too.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from ..model.checkpoint.errors import TokenizerError
from .tokenizer_folder import find_template

_MOST_REASON_CHARS = 200  # of an error's text, which goes to the client


class ChatTemplate:
    """One template. Raises TokenizerError where there is none, or it is malformed; MemoryError, RecursionError."""

    def __init__(self, source: object, *, with_tools: bool = False) -> None:
        """
        Args:
            source: one template, or several by name or as a list of names with templates, of which the default is used.
            with_tools: the one that is named tool_use goes before the default.
        """
        text = find_template(source, "tool_use" if with_tools else "default")
        try:
            self._template = _environment().from_string(text)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # not jinja2's alone: Python compiles what jinja2 makes of a template
            raise _refusal(error) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """tools and documents are None where they are not given.

        Raises:
            TokenizerError: the template refuses what it is given, or fails.
            MemoryError, RecursionError: it takes too much.
        """
        try:
            return self._template.render({"tools": None, "documents": None, **variables})
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # a template can raise anything that an expression of Python can
            raise _refusal(error) from error


def _refusal(error: Exception) -> TokenizerError:
    """The refusal in one line that every message can hold, whatever the template put into its error."""
    reason = " ".join(str(error).encode(errors="replace").decode().split())[:_MOST_REASON_CHARS]
    return TokenizerError(f"chat template: {reason or type(error).__name__}")


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace)
    return environment


class _Generation(jinja2.ext.Extension):
    """The tag `generation` around what a model says, which trainers ask for. It changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


class _Dict:
    """`dict` of a template: it makes dictionaries, and leads to nothing of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` of a template, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as jinja2's, so that a template may name one "self"
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no names that begin with an underscore, as {name!r} does")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces jinja2's own filter: it escapes HTML, which chat templates do not expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    """The time of day here, in the local time zone."""
    return datetime.now().strftime(format)
