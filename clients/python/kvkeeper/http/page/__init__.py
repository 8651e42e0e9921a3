"""The page for a person: a chat with the model that is served.

Owns its files (index.html, chat.css, chat.js), which are sent as they are; no step builds them. May import starlette.
"""

from importlib import resources

from starlette.responses import Response
from starlette.routing import Route

_KINDS = {"": "text/html", "chat.css": "text/css", "chat.js": "text/javascript"}
_HEADERS = {
    # What a model writes is set as text. Nothing that it could bring into the page would be run, or fetched from elsewhere.
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes() -> list[Route]:
    """The page at /, and what it consists of."""
    return [_route(name, kind) for name, kind in _KINDS.items()]


def _route(name: str, kind: str) -> Route:
    body = resources.files(__name__).joinpath(name or "index.html").read_bytes()

    async def send(_: object) -> Response:
        return Response(body, headers=_HEADERS, media_type=kind)

    return Route(f"/{name}", send)
