"""What is in the protocol and not in this build: one list, held by a test."""

# Method -> feature of the NOT_IMPLEMENTED answer.
UNIMPLEMENTED_METHODS: dict[str, str] = {}

# Field of GenerateRequest -> feature. Their neutral values are accepted.
UNIMPLEMENTED_FIELDS = {
    "beam_search": "beam search",
}
