"""The ground of the core: identifiers, configuration, the columns of a step, results, errors and counters.

Values only, frozen where they cross an edge.
"""
