"""A memory budget: what it costs a program to keep it, and keeping it.

Contract: bytes are measured in executions of the program on the virtual GPU, seconds are estimates and called so.
Nothing of the program is changed but what its blocks save for backward; the promise is about reserved bytes, a limit
that the runtime enforces. Importing this package imports no torch.
"""

from stalloc.lazy import loaded_on_use

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that has no budget pays for nothing
    from stalloc.fitting.capping import Cap, cap
    from stalloc.fitting.fit_record import Candidate, Fit
    from stalloc.fitting.keeping import budget, fit

__all__ = ["Candidate", "Cap", "Fit", "budget", "cap", "fit"]

_MODULES = {"Candidate": ".fit_record", "Fit": ".fit_record", "Cap": ".capping", "cap": ".capping"}
_MODULES |= {"budget": ".keeping", "fit": ".keeping"}

__getattr__ = loaded_on_use(__name__, _MODULES)
