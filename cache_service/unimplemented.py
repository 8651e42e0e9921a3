"""What is in the protocol and not in this build: one list, told by GetCapabilities and held by a test."""

# Method -> feature of the NOT_IMPLEMENTED answer.
UNIMPLEMENTED_METHODS = {
    "HandOffSequence": "hand-off between sessions",
}
