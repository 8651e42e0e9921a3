"""InputLimits: the most bytes and strings of text that one request may bring, before anything is made of them.

Each is a setting of its own, and a refusal names the setting's flag beside the limit. Knows no config.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Limits of one request."""

    text_bytes: int = 1 << 20  # of a text, or of the contents of a chat
    constraint_bytes: int = 64 << 10  # of a schema, a pattern, or all choices together
    num_stop_strings: int = 16
    stop_bytes: int = 256  # of one stop string
