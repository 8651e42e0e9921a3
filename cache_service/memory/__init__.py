"""Memory of pools and how other processes come by it: shared_memory owns an arena, attach hands it over."""
