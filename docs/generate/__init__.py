"""The pages of docs/ that are made from the sources, so that they cannot say anything else.

Owns their texts and forms; `make docs` writes them, and a test holds them current. Beside them, the picture of the dashboard is
made by hand from a Prometheus server. May import everything of kvkeeper, grimp, grpcio-tools and matplotlib; nothing imports it
but its test.
"""

from collections.abc import Callable, Mapping

from docs.generate import api, configuration, imports, models, states

# By file name in docs/.
PAGES: Mapping[str, Callable[[], str]] = {
    "api.md": api.page,
    "configuration.md": configuration.page,
    "imports.md": imports.page,
    "models.md": models.page,
    "states.md": states.page,
}
