"""A Hugging Face folder on disk: JSON files, safetensors, and the digest that names the weights.

Reads files, unpickles nothing.
"""
