"""The core on one event loop: sessions and their leases, pools with their memory, and work in slices between steps."""
