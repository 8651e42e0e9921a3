"""Protobuf messages to values and back, with every bound checked on the way in. Changes no state.

Checks what the core cannot see once it has values: sizes of columns, ranges of narrower types, lengths of texts. The core
checks what the values mean. May import values of the core and of the runtime, to show them as messages.
"""
