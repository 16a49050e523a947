"""Statuses that the virtual GPU's driver gives on demand, so that what a real machine may say is tried without one.

    STALLOC_VIRTUAL_FAULTS=cuMemSetAccess:801,cuMemCreate:2@7,device1:busy,peer1:refused

Each entry is NAME:STATUS, with @N for the N-th call alone and @N+ for all from there on. NAME is a function of the
driver or the runtime, `deviceN` (no context can be made on it), `peerN` (no other device may map its memory for it),
`rdma` or `export` (memory that network cards, or other processes, may reach is refused), or `range` (addresses for more
than 1 GiB are). STATUS is a number of CUDA's, or `busy` (46), `refused` (801), or `hang`: the call does not return.
After 214 and most from 700 on the context is lost, as on a GPU: every later call that uses it says the same.
What the driver answers is changed by NAME:NUMBER or NAME:none: `attributeN` of a device, `peers` (whether devices reach
each other), `memory` (what is free, in MiB).
"""

import ctypes
import re

from stalloc.errors import BadInputError

VARIABLE = "STALLOC_VIRTUAL_FAULTS"
_ENTRY = re.compile(r"([A-Za-z]\w{0,30}):(?:([0-9]{1,4})|([a-z]+))(?:@([1-9][0-9]{0,8})(\+?))?", re.ASCII)
_WORDS = {"busy": 46, "refused": 801, "hang": 1 << 20, "none": 1 << 21}
_ALWAYS = (1 << 64) - 1


def set_faults(library: ctypes.CDLL, text: str) -> None:
    """Let a virtual driver fail as `text` says. Raises BadInputError for what means nothing."""
    library.stalloc_virtual_forget_faults()
    for entry in filter(None, (part.strip() for part in text.split(","))):
        found = _ENTRY.fullmatch(entry)
        status = int(found[2]) if found and found[2] else _WORDS.get(found[3] or "", 0) if found else 0
        if not found or status == 0:
            raise BadInputError(
                f"{VARIABLE} has {entry[:40]!r}: write NAME:STATUS, such as cuMemCreate:2@7 or device1:busy."
            )
        first = int(found[4] or 1)
        last = first if found[4] and not found[5] else _ALWAYS
        name = found[1].encode()
        if library.stalloc_virtual_add_fault(name, status, ctypes.c_uint64(first), ctypes.c_uint64(last)):
            raise BadInputError(f"{VARIABLE} has {entry[:40]!r}: no call of that name can be told to fail.")
