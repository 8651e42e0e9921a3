"""The tiers below the host tier, asked by the name of content: on a disk of the pool's own, or in a store that others share.

Owns what each of them has or was heard to have, what is asked of it, what is on its way from it and to it, whether it is worth
a load, and whether it is asked at all. NamedTier is what the others see of one tier, TierChain of all. Their orders name
content and are run by threads. May import the host tier, pool_state and all below.
"""
