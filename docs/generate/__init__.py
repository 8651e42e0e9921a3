"""The pages of docs/ that are made from the sources, so that they cannot say anything else.

Owns their texts and forms; `make docs` writes them, and a test holds them current. Beside them, the picture of the dashboard is
made by hand from a Prometheus server. May import everything of kvkeeper, grimp, grpcio-tools and matplotlib; nothing imports it
but its test.
"""

from collections.abc import Callable, Mapping

from docs.generate import api, configuration, fork_picture, http_fields, imports, models, roles, states

# By path in docs/.
PAGES: Mapping[str, Callable[[], str]] = {
    "fork.svg": fork_picture.page,
    "SECURITY.md": roles.page,
    "api/api.md": api.page,
    "operate/configuration.md": configuration.page,
    "inside/imports.md": imports.page,
    "operate/http.md": http_fields.page,
    "operate/models.md": models.page,
    "inside/states.md": states.page,
}
