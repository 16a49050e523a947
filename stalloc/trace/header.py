"""The header of a trace file: what it must say of each device, held against the types that readers count on.

Contract: what passes has the types that the Trace record states; keys of `info` that nobody knows are kept as they are.
"""

import json
from collections.abc import Callable
from typing import Any

from stalloc.trace.record import MAX_BYTES

SCHEMA_VERSION = 1
FORMAT = "stalloc trace"
MAX_HEADER_BYTES = 16 << 20
MAX_DEVICE = 4095
_Check = Callable[[Any], bool]


class NotATrace(ValueError):
    """The archive is of another kind, or of another version; the text says which."""


def read_header(content: bytes) -> list[dict[str, Any]]:
    """The entries of the devices. Raises NotATrace, and what damaged JSON raises."""
    if len(content) > MAX_HEADER_BYTES:
        raise ValueError(f"its header is {len(content):,} bytes long")
    header = json.loads(content)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise NotATrace("not a trace of stalloc: give a .trace.npz file that stalloc wrote")
    schema = header.get("schema")
    if type(schema) is not int or schema != SCHEMA_VERSION:
        shown = str(schema)[:20] if type(schema) is int else f"of type {type(schema).__name__}"
        raise NotATrace(
            f"written with trace schema {shown}, this stalloc reads {SCHEMA_VERSION}: "
            f"use the version of stalloc that wrote it, or record again"
        )
    entries = header.get("devices")
    if not isinstance(entries, list) or not entries:
        raise ValueError("its header lists no devices")
    for number, entry in enumerate(entries):
        _check_entry(number, entry)
    if len({entry["device"] for entry in entries}) < len(entries):
        raise ValueError("its header has a device twice")
    return entries


def _check_entry(number: int, entry: Any) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"entry {number} of its header is no object")
    for name, (is_right, expected) in _ENTRY.items():
        if name not in entry or not is_right(entry[name]):
            raise ValueError(f"{name} of device {number} in its header is not {expected}")
    for name, value in entry["info"].items():
        is_right, expected = _INFO.get(name, (_anything, ""))
        if not is_right(value):
            raise ValueError(f"info.{name} of device {number} in its header is not {expected}")


def _anything(value: Any) -> bool:
    return True


def _whole(lowest: int, highest: int) -> _Check:
    return lambda value: type(value) is int and lowest <= value <= highest


def _is(kind: type) -> _Check:
    return lambda value: isinstance(value, kind)


def _list_of(is_right: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a truth value or nothing."""
    return value is None or isinstance(value, str | int | float | bool)


def is_settings(value: Any) -> bool:
    """Whether a value is what a snapshot says of its allocator's settings: plain values, or one dictionary of them."""
    if not isinstance(value, dict):
        return False
    return all(
        isinstance(key, str)
        and (is_plain(item) or (isinstance(item, dict) and all(map(is_plain, [*item, *item.values()]))))
        for key, item in value.items()
    )


_ENTRY: dict[str, tuple[_Check, str]] = {
    "device": (_whole(0, MAX_DEVICE), f"a number from 0 to {MAX_DEVICE}"),
    "streams": (_list_of(_whole(-(1 << 63), (1 << 64) - 1)), "a list of streams"),
    "names": (_list_of(_is(str)), "a list of names"),
    "reserved_start_bytes": (_whole(0, MAX_BYTES), "a number of bytes"),
    "info": (_is(dict), "an object"),
}
_INFO: dict[str, tuple[_Check, str]] = {
    "source": (_is(str), "text"),
    "file": (_is(str), "text"),
    "converted_from": (_is(str), "text"),
    "device_name": (_is(str), "text"),
    "torch": (_is(str), "text"),
    "complete": (_is(bool), "true or false"),
    "notes": (_list_of(_is(str)), "a list of texts"),
    "unseen_bytes": (_whole(0, MAX_BYTES), "a number of bytes"),
    "total_bytes": (_whole(0, MAX_BYTES), "a number of bytes"),
    "allocator_settings": (is_settings, "a table of settings"),
}
