"""Mutations of bytes, of lines and cells, of JSON as text, of values as JSON and pickles hold them, and of gzip."""

import gzip
import json
import math
import random
import zlib
from functools import cache
from typing import Any

TEXTS = ("", "0", "-1", "alloc", "x" * 300, "\x1b[2J", "a\nb", "\u202e", "[/]", "9" * 30, "1e999", "../../x", "\ud800")
NUMBERS = (0, 1, -1, 2**31, 2**32, 2**44, 2**44 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 10**40)
OTHERS = (0.5, -0.0, 1e308, math.nan, math.inf, -math.inf, True, False, None)
DEPTHS = (3, 50, 900, 990)


def mutate_tree(rng: random.Random, root: Any) -> Any:
    """The value with one thing changed somewhere; containers of it are changed in place."""
    parent, key = _place(rng, root)
    if parent is None:
        return _other_value(rng, root)
    action = rng.randrange(8)
    if action < 3:
        parent[key] = _other_value(rng, parent[key])
    elif action == 3:
        del parent[key]
    elif action == 4:
        _duplicate(rng, parent, key)
    elif action == 5:
        other = rng.choice(list(_keys(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif action == 6 and isinstance(parent, dict):
        parent[rng.choice([*TEXTS, *map(str, parent)])] = parent.pop(key)
    else:
        donor, name = _place(rng, root)
        if donor is not None and not isinstance(donor[name], dict | list):  # containers could come to hold themselves
            parent[key] = donor[name]
    return root


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _place(rng: random.Random, root: Any) -> tuple[Any, Any]:
    """A container and a key of it, at any depth; None if the value holds nothing."""
    parent, key, at = None, None, root
    while isinstance(at, dict | list) and len(at):
        parent, key = at, rng.choice(list(_keys(at))) if isinstance(at, dict) else rng.randrange(len(at))
        if rng.random() < 0.12:
            break
        at = at[key]
    return parent, key


def _duplicate(rng: random.Random, parent: Any, key: Any) -> None:
    if isinstance(parent, dict):
        parent[rng.choice(TEXTS)] = parent[key]
    elif rng.random() < 0.9:
        parent.insert(rng.randrange(len(parent) + 1), parent[key])
    else:
        parent[key:key] = [parent[key]] * rng.choice([10, 1000])


def _other_value(rng: random.Random, value: Any) -> Any:
    choice = rng.randrange(7)
    if isinstance(value, int | float) and choice < 3:
        return rng.choice([value + 1, value - 1, -value, value * 2, value + 2**32, str(value), float(value % 2**60)])
    if isinstance(value, list) and choice < 2:
        return value[::-1] if choice else value[: rng.randrange(len(value) + 1)]
    if isinstance(value, str) and choice < 2:
        return value[: rng.randrange(len(value) + 1)] + rng.choice(TEXTS)
    if choice == 3:
        return rng.choice(TEXTS)
    if choice == 4:
        return rng.choice([[], {}, [value], {"": value}, [[value]] * 3, _nested(rng.choice(DEPTHS))])
    return rng.choice(NUMBERS if choice < 6 else OTHERS)


def _nested(depth: int) -> Any:
    value: Any = 0
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


TOKENS = (
    *(b"[", b"]", b"{", b"}", b'"', b",", b":", b"-", b"0", b"\\", b"\n", b"\r", b"\0", b"\xff", b"<", b"\xef\xbb\xbf"),
    *(b"9" * 25, b"9" * 5000, b"1e999", b"-1", b"null", b"true", b"NaN", b"Infinity", b"18446744073709551616"),
    *(b"[" * 200, b"[" * 100_000, b'{"a":' * 5000, b"\\ud800", b"\x1b[2J", b"\n" * 1000, b'"' + b"x" * 2000 + b'"'),
)


def mutate_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """The bytes flipped, cut, repeated, spliced with another file's, or with a token put in."""
    at = rng.randrange(len(data) + 1)
    span = min(len(data), at + rng.choice([0, 1, 1, 2, 8, 100]))
    match rng.randrange(7):
        case 0 if data:
            at = rng.randrange(len(data))
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[span:]
        case 3:
            return data[:span] + data[at:]
        case 4:
            begin = rng.randrange(len(other) + 1)
            return data[:at] + other[begin : begin + rng.choice([4, 60, 1000])] + data[span:]
        case 5:
            number = rng.choice([0, 1, 0x7F, 0x80, 0xFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
            size = rng.choice([1, 2, 4, 8])
            order = rng.choice(["little", "big"])
            return data[:at] + (number % 256**size).to_bytes(size, order) + data[at + size :]  # type: ignore[arg-type]
        case _:
            return data[:at] + rng.choice(TOKENS) + data[span:]


def mutate_json(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """JSON with a value changed; what cannot be written as JSON again is changed as bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data, other)
    try:
        return json.dumps(mutate_tree(rng, json.loads(data))).encode()
    except (ValueError, RecursionError, KeyError, IndexError):
        return mutate_bytes(rng, data, other)


def mutate_lines(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Lines dropped, repeated, swapped, or with one cell changed; a line of JSON has a value changed."""
    lines = data.split(b"\n")
    number = rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            del lines[number]
        case 1:
            lines.insert(rng.randrange(len(lines) + 1), lines[number])
        case 2:
            another = rng.randrange(len(lines))
            lines[number], lines[another] = lines[another], lines[number]
        case 3 if lines[number].startswith(b"{"):
            lines[number] = mutate_json(rng, lines[number], other)
        case 3 | 4:
            cells = lines[number].split(b",")
            cells[rng.randrange(len(cells))] = rng.choice([*TOKENS[:-1], b"", b"7", rng.choice(cells)])
            lines[number] = b",".join(cells)
        case _:
            return mutate_bytes(rng, data, other)
    return b"\n".join(lines)


def mutate_page(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A page with its JSON changed if it can be found, else as bytes."""
    begin = data.find(b"alloc_data = ")
    if begin < 0 or rng.random() < 0.5:
        return mutate_bytes(rng, data, other)
    begin += len(b"alloc_data = ")
    try:
        _, length = json.JSONDecoder().raw_decode(data[begin:].decode())
    except (ValueError, RecursionError):
        return mutate_bytes(rng, data, other)
    return data[:begin] + mutate_json(rng, data[begin : begin + length], other) + data[begin + length :]


def packed(rng: random.Random, data: bytes) -> bytes:
    """The bytes under gzip, sometimes damaged after it, or followed by what unpacks to very much."""
    made = gzip.compress(data, 1, mtime=0)
    choice = rng.random()
    if choice < 0.5:
        return mutate_bytes(rng, made, data)
    if choice < 0.51:  # costs seconds even where it is refused
        return made + bomb(rng.choice(b'\n0[]{" \x80)('))
    return made


@cache
def bomb(byte: int) -> bytes:
    """Some three MB that gzip unpacks to 3 GiB of one byte, in members of 16 MiB."""
    member = gzip.compress(bytes([byte]) * (16 << 20), 6, mtime=0)
    return member * 192


@cache
def deflated_zeros(num_mib: int) -> bytes:
    """A deflate stream of so many MiB of zeros."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)  # refers to nothing before it
    return piece * num_mib + packer.flush()
