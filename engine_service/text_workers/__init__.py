"""Text and constraints in worker processes, within limits of time and memory, so that no client holds up the loop."""
