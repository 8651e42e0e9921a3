"""ChatTemplate: a conversation as the text that a model was trained on, by the model's own template, in a sandbox."""

import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.sandbox

from ..model.checkpoint.errors import TokenizerError


class ChatTemplate:
    """One template. Raises TokenizerError where there is none, or it is malformed."""

    def __init__(self, source: object) -> None:
        """source: one template, or a list of named templates, of which the default is used."""
        try:
            self._template = _compile_template(source)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TokenizerError(f"chat template: {error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises TokenizerError where the template refuses what it is given, or fails."""
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TokenizerError(f"chat template: {error}") from error


def _compile_template(source: object) -> jinja2.Template:
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
        source = named.get("default")
    if not isinstance(source, str):
        raise TokenizerError("the model has no chat template")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def _to_json(value: object, indent: int | None = None) -> str:
    """Replaces jinja2's own filter: it escapes HTML, which chat templates do not expect."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
