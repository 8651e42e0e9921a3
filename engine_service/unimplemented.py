"""What is in the protocol and not in this build: one list, held by a test."""

# Method -> feature of the NOT_IMPLEMENTED answer.
UNIMPLEMENTED_METHODS = {
    "GetIterationPlan": "iteration plans",
    "GetRequest": "requests that outlive their connection",
    "SubmitRequest": "requests that outlive their connection",
}

# Field of GenerateRequest -> feature. Their neutral values are accepted.
UNIMPLEMENTED_FIELDS = {
    "retention": "sink and window retention",
    "sampling.num_logprobs": "log probabilities",
}
