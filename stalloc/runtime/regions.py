"""Old place."""

from stalloc.core.regions import Region, moved_into  # noqa: F401
