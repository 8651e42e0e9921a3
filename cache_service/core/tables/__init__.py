"""What the items of a step do to block tables: commit, fork, truncate, release, reserve and start.

Every operation takes lawful items and cannot fail.
"""
