"""Pictures in requests to an engine that serves the text part of a model which reads pictures, too: refused by their number."""

from typing import Any, Final

from kvkeeper.http.errors import refused

_KINDS: Final = frozenset(("image", "image_file", "image_url", "input_image"))  # of parts, in the APIs that are served
_WITHIN: Final = ("content", "output")  # the fields of a message, or of a tool's result, that have parts


def refuse_pictures(text_part_of: str, said: object, where: str) -> None:
    """Raises HttpError where the messages have pictures.

    Args:
        text_part_of: the type of the model whose text part is served; empty: the model reads text alone, which others say.
        said: messages as they came. where: their field.
    """
    if text_part_of and (count := _count(said)):
        pictures = "1 picture" if count == 1 else f"{count} pictures"
        raise refused(where, f"this engine reads the text part of {text_part_of}, and the request has {pictures}")


def _count(said: Any) -> int:
    if isinstance(said, list):
        return sum(map(_count, said))
    if not isinstance(said, dict):
        return _count(said.content) if hasattr(said, "content") else 0
    return 1 if said.get("type") in _KINDS else sum(_count(said.get(field)) for field in _WITHIN)
