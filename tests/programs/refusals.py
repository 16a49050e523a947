"""What stalloc says where it refuses something, for programs of tests."""

from collections.abc import Callable
from typing import Any

import stalloc


def sentence(do: Callable[[], Any]) -> str:
    """The sentence of the error that something ends in; empty if it ends well."""
    try:
        do()
    except stalloc.StallocError as error:
        return str(error)
    return ""
