"""Guarding what tests and programs allocate: limits, a baseline, leaks; for pytest and `stalloc diff --check`.

Contract: allocated is judged, reserved is told. Importing this package, or the pytest plugin in it, loads nothing else.
"""
