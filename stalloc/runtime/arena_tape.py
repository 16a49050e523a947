"""Old place."""

from stalloc.core.arena_tape import ArenaTape, check  # noqa: F401
