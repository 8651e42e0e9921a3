"""The ground of the engine service: requests, batches, sampling parameters, output chunks and errors.

Values only.
"""
