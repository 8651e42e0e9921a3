"""One iteration of an engine: validate decides whether all of it is lawful, apply carries it out, reply tells it."""
