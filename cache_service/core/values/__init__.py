"""The ground of the core: values only, frozen where they cross an edge.

Owns identifiers and enumerations, the values that describe a pool, a sequence and a step, copies to be run, what callers are
shown, errors and counters. May import numpy and the standard library, and nothing of the services.
"""
