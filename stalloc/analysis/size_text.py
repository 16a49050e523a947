"""Sizes as error texts write them: `3.91 GiB`, `7.42G`, `128.000000MB`, `1,024 bytes`, `805306368`.

Contract: units are powers of 1,024, as every library of ours counts, and a comma before one or two last digits is that
of a decimal; a number that no device can hold, which is what an overflow prints, is not a size.
"""

import re

#: one size; a bare number counts bytes
SIZE = r"\d[\d.,]*(?: ?(?:[KkMGT](?:i?B)?|[Bb]ytes?|B)\b)?"
MOST_BYTES = 1 << 44  #: no device holds more
ANY_BYTES = 1 << 64  #: what a size that was computed wrongly can be
_SHIFTS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def size_bytes(text: str | None, most_bytes: int = MOST_BYTES) -> int | None:
    """The bytes of a size as text; None if it is no size, or more than `most_bytes`."""
    match = re.fullmatch(r"(\d[\d.,]*) ?([A-Za-z]*)", text or "")
    digits = re.sub(r",(?=\d{1,2}$)", ".", match[1]) if match else ""
    digits = digits.replace(",", "").strip(".")
    if match is None or not re.fullmatch(r"\d{1,20}(\.\d{1,10})?", digits):
        return None
    found = round(float(digits) * (1 << _SHIFTS[match[2][:1].lower()]))
    return found if found <= most_bytes else None
