"""Threads that wait for work without keeping a processor busy, of libraries that are loaded by this process.

Contract: OpenMP reads its variables once, when it is loaded; none is left behind, so that a program sees those that it
was given. Results are the same. Threads that spin while they wait make three quarters of what a virtual GPU takes to
initialise the weights of a model on two processors.
"""

import contextlib
import os
from collections.abc import Iterator

_POLICY = "OMP_WAIT_POLICY"


@contextlib.contextmanager
def patient_threads() -> Iterator[None]:
    """What is loaded within waits so, unless the user has said how."""
    if _POLICY in os.environ:
        yield
        return
    os.environ[_POLICY] = "passive"
    try:
        yield
    finally:
        os.environ.pop(_POLICY, None)
