"""Old place."""

from stalloc.core.intrinsics import call3  # noqa: F401
