"""A memory budget: what it costs a program to keep it, and keeping it.

Contract: bytes are those of real executions of the program on the virtual GPU, seconds are estimates and called so.
Nothing of the program is changed but what its blocks save for backward; what is promised, reserved bytes, is a limit
that the runtime holds. Importing this package imports no torch.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that has no budget pays for nothing
    from typing import Any

    from stalloc.fitting.fit_record import Candidate, Fit
    from stalloc.fitting.keeping import budget, fit

__all__ = ["Candidate", "Fit", "budget", "fit"]

_OF_RECORD = ("Candidate", "Fit")


def __getattr__(name: str) -> "Any":
    if name in _OF_RECORD:
        from stalloc.fitting import fit_record

        return getattr(fit_record, name)
    if name in ("budget", "fit"):
        from stalloc.fitting import keeping

        return getattr(keeping, name)
    raise AttributeError(f"module 'stalloc.fitting' has no attribute {name!r}")
