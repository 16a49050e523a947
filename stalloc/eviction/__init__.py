"""Needing less memory by decisions while a program runs: what is evicted when the next request does not fit."""
