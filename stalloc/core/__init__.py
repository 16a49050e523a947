"""The compiled allocator: heap, plan and leases of one device, under one lock, without Python.

Contract: it knows no policy. It counts, serves and records; what it needs done (a segment, a look at what was
recorded, a plan) it asks `stalloc.runtime` for, with the lock released. `records.py` declares its data, `requests.py`
is the way of a request; what Python calls is described where it does, in `state.py` and `device_parts.py`.
"""
