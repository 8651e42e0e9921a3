"""Questions that change nothing: statistics, explanations of a match, and the audit of every invariant."""
