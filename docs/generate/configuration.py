"""docs/operate/configuration.md: every setting of both services and of the holder, from the fields of their configs."""

from itertools import groupby
from typing import Any

from docs.generate.markdown import code_span, head, prose, table
from kvkeeper.cache_service.config import SOURCE as CACHE
from kvkeeper.common.hold.config import SOURCE as HOLD
from kvkeeper.common.service.config import ConfigSource
from kvkeeper.common.service.settings import Setting, list_settings
from kvkeeper.engine_service.config import SOURCE as ENGINE

_INTRO = """\
A flag goes over its environment variable, which goes over the file of `--config`, which goes over the default; an empty
variable counts as not given. `--help` of `kvkeeper cache`, `kvkeeper engine` and `kvkeeper hold` tells the same. `kvkeeper up`
takes every flag of a service with its name in front, such as `--cache-num-pools 1`. A wrong value is refused at start in one
line that names the flag, the variable, or the file with its table and key.

One file serves both services, `kvkeeper up` and `kvkeeper serve`; its keys are the flags without their dashes in front:

```toml
[cache]
pool-memory = "8GiB"
keep = true
memory-dir = "/dev/shm/kvkeeper"

[engine]
model = "/models/llama"
token-budget = 8192
```

`kvkeeper config show --config FILE` prints every setting as it would apply, and where it stands; with `--set`, those that are
not at their defaults."""


def page() -> str:
    lines = head("Configuration", _INTRO)
    for title, source in (("The cache service", CACHE), ("The engine service", ENGINE), ("The holder", HOLD)):
        lines += [f"## {title}: `{source.program}`", ""]
        lines += _tables(source)
    return "\n".join(lines).rstrip() + "\n"


def _tables(source: ConfigSource[Any]) -> list[str]:
    lines = []
    groups = [one.group for one in list_settings(source.config)]
    settings = sorted(list_settings(source.config), key=lambda one: groups.index(one.group))
    for group, members in groupby(settings, key=lambda one: one.group):
        lines += [f"### {source.program.split()[-1].capitalize()}: {group.lower()}", ""]
        rows = [_row(one, source.variable(one)) for one in members]
        lines += table(["flag", "environment variable", "values", "default", "meaning"], rows)
    return lines


def _row(one: Setting, variable: str) -> list[str]:
    flags = code_span(one.flag)
    if one.is_switch:
        flags += f", {code_span(one.flag.replace('--', '--no-', 1))}"
    values = ", ".join(map(code_span, one.choices)) or prose(one.values)
    if one.example:
        values += f"{', ' if values else ''}such as {code_span(one.example)}"
    meaning = f"{one.help[0].upper()}{one.help[1:]}. {one.details}".strip()
    return [flags, code_span(variable), values, prose(one.default_text), prose(meaning)]
