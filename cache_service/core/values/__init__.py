"""The ground of the core: values only, frozen where they cross an edge.

Owns identifiers and enumerations (types), the configuration of a pool, the arguments of a sequence, the columns of a step,
copies to be run, what callers are shown (views), errors and counters. May import numpy and nothing of the services.
"""
