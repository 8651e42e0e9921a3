"""Guessed tokens: where guesses come from, and whether guessing pays."""
