"""`make vllm-check`: real vLLM processes with the connector on a real cache service, against vLLM without it.

Owns the environment of vLLM's, a small random model, the processes and what is checked of them. May import kvkeeper.client,
tests.support and rich; process.py, model.py and read_events.py run in vLLM's environment and import nothing of ours but the
connector.
"""
