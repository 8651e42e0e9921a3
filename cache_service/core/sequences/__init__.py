"""Sequences and the sessions that hold them: the table of rows, retention, claims, and what waits to be published."""
