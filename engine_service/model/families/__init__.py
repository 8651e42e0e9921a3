"""Which families the decoder has.

Owns what a family may be made of (family.py), and the one table of them (table.py). A new family is a row of the table, as long
as its parts are known; docs/development.md shows it.
May import: the standard library.
"""
