"""The kernels of layers that keep a state of fixed size: gated delta nets (arXiv 2412.06464), the norm behind them, and gated
short convolutions.

Owns the ops, their checks and torch's way of computing them. What the parent's charter says holds here. May import the parent's
modules and cpu, and gpu inside functions alone.
"""
