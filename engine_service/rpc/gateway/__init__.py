"""The gateway's protocol, vllm.grpc.engine.VllmEngine, beside our own.

Each call is put into a message of ours, and its reply is made from ours. A gateway speaks HTTP with the clients of OpenAI and
Anthropic, makes tokens of their texts and texts of our tokens, and knows of an engine what these calls report. MAY import: the
rest of rpc, loop, cache_session, config, values. The messages come from the package of the extra `gateway`; without it nothing
here is imported.
"""
