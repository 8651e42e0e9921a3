"""Several processes that compute one model together: tensor parallelism.

Owns the processes of all ranks but the first, what is said between them and the first, and what the loss of one means. The
first rank is the engine itself: it alone schedules, talks with the cache service and draws tokens. Its loop meets the others as
a Runner like any other. May import kvkeeper.client, which maps each rank's arena, torch, compute, model, config and values.
"""
