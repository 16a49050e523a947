"""Guarding what tests and programs allocate: limits, a committed baseline, leaks; for pytest and for `stalloc check`.

Contract: allocated is judged, reserved is told. Importing this package, or the pytest plugin in it, loads nothing else.
"""
