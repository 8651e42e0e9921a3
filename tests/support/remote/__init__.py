"""A real Redis server of a test, which can be killed, hung, filled and corrupted. Stands on nothing but the package redis."""
