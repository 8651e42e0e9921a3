"""What is in the protocol and not in this build: one list, held by a test."""

# Method -> feature of the NOT_IMPLEMENTED answer.
UNIMPLEMENTED_METHODS: dict[str, str] = {}
