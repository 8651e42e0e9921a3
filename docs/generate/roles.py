"""docs/SECURITY.md: the table of its section on roles, from the one that the gate goes by; the rest is by hand."""

import re
from pathlib import Path

from docs.generate.markdown import code_span, table
from kvkeeper.common.trust.caller import Role
from kvkeeper.common.trust.roles import TABLE

_PAGE = Path(__file__).resolve().parents[1] / "SECURITY.md"
_TABLE = re.compile(r"(?<=edits are lost. -->\n\n)(\|.*\n)+")


def page() -> str:
    """The page as it is, with the table of today: a row for the calls of a service that the same roles may make."""
    calls: dict[tuple[str, frozenset[Role]], list[str]] = {}
    for service, methods in TABLE.items():
        for name, roles in methods.items():
            calls.setdefault((service, roles), []).append(name)
    rows = [
        [code_span(service), ", ".join(map(code_span, names)), *("yes" if role in roles else "" for role in Role)]
        for (service, roles), names in calls.items()
    ]
    lines = table(["service", "calls", *(role.value for role in Role)], rows)
    text, count = _TABLE.subn("\n".join(lines), _PAGE.read_text(), count=1)
    assert count, "docs/SECURITY.md has no table of roles"
    return text
