"""Which families the decoder has.

Owns what a family may be made of (family.py), the one table of them (table.py), and what keeps a model of the transformers
library from being computed (why_not_paged). A new family is a row of the table, as long as its parts are known;
docs/inside/development.md shows it.
May import: the standard library.
"""
