"""Mutants of the package, and whether a test tells them from it."""
