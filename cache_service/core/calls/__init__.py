"""Calls beside the step: creating and updating sequences, prefixes, eviction, victims, sessions and their ends.

Each file is one group of calls.
"""
