"""Protobuf messages to values and back. Owns every bound that is checked on the way in; changes no state.

Checks what the core cannot see once it has values: sizes of columns, ranges of narrower types, lengths of texts. The core
checks what the values mean. May import core, and from runtime what it shows as messages.
"""
