"""What runs in the worker thread, with torch: one step's copies, forward pass, sampling and log probabilities.

Owns a model on the memory of the cache service, and how its logits become tokens. May import model, outputs, scheduler, values
and config, torch and the kernels; knows neither the session nor a stream.
"""
