"""docs/SECURITY.md tells the table of roles as the gate has it, cell by cell."""

from kvkeeper.common.trust.caller import Role
from kvkeeper.common.trust.roles import TABLE
from tests.support.documents.markdown import page


def test_the_page_has_the_cells_of_the_code() -> None:
    told: dict[str, dict[str, frozenset[Role]]] = {}
    for service, calls, *cells in page("docs/SECURITY.md").table("Roles"):
        assert set(cells) <= {"yes", ""} and len(cells) == len(Role)
        roles = frozenset(role for role, cell in zip(Role, cells, strict=True) if cell)
        for call in calls.split(", "):
            assert call.strip("`") not in told.setdefault(service.strip("`"), {})
            told[service.strip("`")][call.strip("`")] = roles
    assert told == TABLE
