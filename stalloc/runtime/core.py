"""Old names of what Python calls in the core, until the policy files use the new ones."""

# ruff: noqa: F401
from stalloc.core.arena import arena_is_idle, forget_arena
from stalloc.core.counters import count_arena as reserve
from stalloc.core.pools import general_pool
from stalloc.core.pools import unpin_pools as release_private
from stalloc.core.requests import finish_deferred, free_entry, share
from stalloc.core.requests import free as free_on
from stalloc.core.requests import malloc as allocate_on
from stalloc.core.requests import malloc_entry as allocate_entry
from stalloc.core.segments import reuse_segment as unfence_segment
from stalloc.core.tape import begin_step
