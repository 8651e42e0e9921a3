"""A real model, SmolLM2-135M-Instruct, held to transformers: `make model-check`.

It fetches 93 MB, so it is no part of `make test`.
"""
