"""Figures, never assertions: `make bench` prints one JSON object a line, ratios measured in one run."""
