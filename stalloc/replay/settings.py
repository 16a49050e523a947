"""Settings of models: frozen dataclasses whose fields say how their text is read.

Contract: a text of "key:value,…" gives an instance or one BadInputError that names the model, the key and what is
wrong with it.
"""

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any

from stalloc.device.known_gpus import parse_memory
from stalloc.errors import BadInputError


@dataclass(frozen=True, kw_only=True)
class NoSettings:
    """A model without settings."""


def setting(default: Any, read: Callable[[str], Any]) -> Any:
    """A field with a default, read by a function that raises ValueError with what it expects."""
    return field(default=default, metadata={"read": read})


def as_bytes(text: str) -> int:
    """Bytes from "512", "64MiB", "2g"."""
    try:
        return parse_memory(text, at_least=0)
    except BadInputError:
        raise ValueError("a number of bytes, as 64MiB or 2GiB") from None


def as_flag(text: str) -> int:
    """0 or 1."""
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return int(text)


def as_count(text: str) -> int:
    """A whole number from 0."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ValueError("a whole number")
    return int(text)


def as_percent(text: str) -> int:
    """A whole number from 1 to 100."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:4]) <= 100):
        raise ValueError("a percentage from 1 to 100")
    return int(text)


def as_one_of(*choices: str) -> Callable[[str], str]:
    """A reader of one of some words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return read


def read_settings(model: str, kind: type[Any], text: str) -> Any:
    """An instance of a dataclass from "key:value,…".

    Raises BadInputError for a key that the model does not have and for a value that cannot be read.
    """
    known: dict[str, Field[Any]] = {known.name: known for known in fields(kind)}
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, colon, value = (word.strip() for word in part.partition(":"))
        if key not in known:
            names = ", ".join(sorted(known)) or "none"
            raise BadInputError(f"{model} has no setting {key!r}: the settings that it has are: {names}.")
        if not colon:
            raise BadInputError(f"the setting {key} of {model} has no value: write {key}:VALUE.")
        try:
            values[key] = known[key].metadata["read"](value)
        except ValueError as error:
            raise BadInputError(f"the setting {key} of {model} is {value!r}: give {error}.") from None
    return kind(**values)
