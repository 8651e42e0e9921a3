"""What a token reads of a group of layers, worked out apart from the code under test."""

from kvkeeper.cache_service.core.values.kv_spec import ReadSpan


def make_spans(*windows: int) -> tuple[ReadSpan, ...]:
    """The spans of groups with these windows in tokens, 0 for all tokens."""
    return tuple(ReadSpan(window) for window in windows)


def first_read(span: ReadSpan, position: int) -> int:
    """The first token that the one at this position reads, itself at the latest."""
    if not span.num_tokens:
        return 0
    return position - position % span.num_tokens if span.is_chunk else max(0, position + 1 - span.num_tokens)


def least_length(span: ReadSpan, first: int) -> int:
    """The least length, 1 or more, whose next token reads nothing before token `first`."""
    length = max(first, 1)
    while first_read(span, length) < first:
        length += 1
    return length
