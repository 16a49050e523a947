"""Mutations of .npz files: their members, what the archive says of them, their headers, shapes, types and values."""

import io
import json
import random
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache

from .texts import NUMBERS, TEXTS, deflated_zeros, mutate_bytes, mutate_json

_SHAPES = ("()", "(0,)", "(1,)", "(-1,)", "(3, 5)", "(1000000000,)", "(2**40,)", "(9999999999999999999,)", "[1]", "5")
_TYPES = ("<i8", "|O", "<U1000000", "|V8", "<f8", "|u1", ">i8", "<M8[s]", "|b1", "<c16", "<i1", "|S0", "i4,i4", "x")
_STORED, _DEFLATED = 0, 8


@dataclass(frozen=True)
class Member:
    name: bytes
    payload: bytes  #: as it lies in the archive
    method: int
    checksum: int
    num_bytes: int  #: unpacked, as claimed
    flags: int = 0
    extra: bytes = b""


def member(name: bytes, data: bytes, *, packed: bool) -> Member:
    payload = data
    if packed:
        packer = zlib.compressobj(1, zlib.DEFLATED, -15)
        payload = packer.compress(data) + packer.flush()
    return Member(name, payload, _DEFLATED if packed else _STORED, zlib.crc32(data), len(data))


@lru_cache(maxsize=2048)
def members_of(data: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Names and contents, none of what cannot be read."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            if sum(info.file_size for info in archive.infolist()) > 16 << 20:
                return ()  # a bomb among the kept inputs
            return tuple((name.encode("utf-8", "replace"), archive.read(name)) for name in names)
    except Exception:  # what mutations have made of it
        return ()


def write_archive(members: list[Member]) -> bytes:
    """The archive as it is said to be, true or not."""
    out, entries = io.BytesIO(), []
    for one in members:
        sizes = struct.pack("<III", one.checksum, len(one.payload) & 0xFFFFFFFF, one.num_bytes & 0xFFFFFFFF)
        common = struct.pack("<HHHHH", 20, one.flags, one.method, 0, 33) + sizes
        entries.append((one, common, out.tell()))
        out.write(b"PK\3\4" + common + struct.pack("<HH", len(one.name), len(one.extra)))
        out.write(one.name + one.extra + one.payload)
    begin = out.tell()
    for one, common, offset in entries:
        out.write(b"PK\1\2" + struct.pack("<H", 20) + common)
        out.write(struct.pack("<HHHHHII", len(one.name), len(one.extra), 0, 0, 0, 0, offset) + one.name + one.extra)
    count = min(len(entries), 0xFFFF)
    out.write(b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count, out.tell() - begin, begin, 0))
    return out.getvalue()


def mutate_archive(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """An archive with a member, a header, a value or a claim changed, or damaged as bytes."""
    listed = list(members_of(data))
    if not listed or rng.random() < 0.15:
        return mutate_bytes(rng, data, other)
    at = rng.randrange(len(listed))
    header = next((number for number, (name, _) in enumerate(listed) if name.startswith(b"header")), at)
    choice = rng.randrange(12)
    if choice < 3:
        listed[header] = (listed[header][0], _with_json(rng, listed[header][1], other))
    elif choice < 6:
        listed[at] = (listed[at][0], _with_values(rng, listed[at][1]))
    elif choice == 6:
        listed[at] = (listed[at][0], _with_description(rng, listed[at][1]))
    elif choice == 7:
        listed[at] = (listed[at][0], mutate_bytes(rng, listed[at][1], other))
    elif choice == 8:
        another = rng.randrange(len(listed))
        names = listed[at][0], listed[another][0]
        contents = listed[at][1], listed[another][1]
        listed[at], listed[another] = (names[0], contents[1]), (names[1], contents[0])
    elif choice == 9:
        _rename(rng, listed, at)
    packed = rng.random() < 0.7
    members = [member(name, content, packed=packed) for name, content in listed]
    if choice == 10:
        members[at] = _with_claims(rng, members[at])
    elif choice == 11 and rng.random() < 0.03:
        members[at] = _bomb(rng, members[at].name)
    return write_archive(members)


def _rename(rng: random.Random, listed: list[tuple[bytes, bytes]], at: int) -> None:
    name, content = listed[at]
    match rng.randrange(4):
        case 0:
            del listed[at]
        case 1:
            listed.append((name, content))
        case 2:
            listed[at] = (rng.choice(TEXTS).encode("utf-8", "replace") + rng.choice([b"", b".npy", name]), content)
        case _:
            listed += [(b"%d.npy" % number, content[:128]) for number in range(rng.choice([5, 2000]))]


def _with_claims(rng: random.Random, one: Member) -> Member:
    number = rng.choice([0, 1, 2**31, 2**32 - 1, one.num_bytes + 1, max(one.num_bytes - 1, 0)])
    extra = rng.choice([b"\1\0\x10\0" + struct.pack("<QQ", 2**62, 2**40), b"\1\0\xff\xff", b"\0", b"up\5\0\1abcd"])
    return rng.choice(
        [
            replace(one, num_bytes=number),
            replace(one, num_bytes=2**32 - 1, extra=extra),
            replace(one, checksum=one.checksum ^ 1),
            replace(one, method=rng.choice([1, 8, 9, 12, 14, 93, 99])),
            replace(one, flags=rng.choice([1, 8, 0x800, 0x2000])),
            replace(one, payload=one.payload[: len(one.payload) // 2]),
            replace(one, extra=extra),
            replace(one, name=one.name + b"\xff\xfe"),
        ]
    )


def _bomb(rng: random.Random, name: bytes) -> Member:
    mib = 1400
    described = f"{{'descr': '{rng.choice(['<i8', '|u1'])}', 'fortran_order': False, 'shape': ({mib << 17},), }}\n"
    head = b"\x93NUMPY\1\0" + struct.pack("<H", len(described)) + described.encode()
    start = zlib.compressobj(6, zlib.DEFLATED, -15)
    payload = start.compress(head) + start.flush(zlib.Z_FULL_FLUSH) + deflated_zeros(mib)
    return Member(name, payload, _DEFLATED, 0, len(head) + (mib << 20))


def _split(content: bytes) -> tuple[bytes, bytes, bytes]:
    """Magic with the length, the description, and the values of an .npy; ValueError if it is none."""
    if not content.startswith(b"\x93NUMPY\1\0") or len(content) < 10:
        raise ValueError
    end = 10 + int.from_bytes(content[8:10], "little")
    return content[:8], content[10:end], content[end:]


def _joined(magic: bytes, described: bytes, values: bytes) -> bytes:
    return magic + struct.pack("<H", len(described) & 0xFFFF) + described + values


def _with_json(rng: random.Random, content: bytes, other: bytes) -> bytes:
    try:
        _, _, values = _split(content)
        json.loads(values)
    except (ValueError, RecursionError):
        return mutate_bytes(rng, content, other)
    values = mutate_json(rng, values, other)
    described = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({len(values)},), }}\n"
    return _joined(b"\x93NUMPY\1\0", described.encode(), values)


def _with_values(rng: random.Random, content: bytes) -> bytes:
    """Some of the values changed, or values more or less."""
    try:
        magic, described, values = _split(content)
    except ValueError:
        return content
    width = 1 if b"1'" in described else 4 if b"4'" in described else 8
    for _ in range(rng.choice([1, 1, 2, 10])):
        at = rng.randrange(max(len(values) // width, 1)) * width
        number = rng.choice([*NUMBERS[:-1], rng.randrange(100), rng.randrange(1 << 45)])
        change = values[at : at + width]
        if rng.random() < 0.4 and change:
            number = int.from_bytes(change, "little") + rng.choice([1, -1, 512, -512, 1 << 40])
        values = values[:at] + (number % 256**width).to_bytes(width, "little") + values[at + width :]
    if rng.random() < 0.1:
        values = values[: -width * rng.randrange(1, 5)]
        count = len(values) // width
        described = described[: described.rfind(b"(")] + b"(%d,), }\n" % count
    return _joined(magic, described, values)


def _with_description(rng: random.Random, content: bytes) -> bytes:
    try:
        magic, _, values = _split(content)
    except ValueError:
        return content
    if rng.random() < 0.2:
        text = rng.choice(
            ["{}", "[]", "__import__('os').getpid()", "(" * 300, "{'descr': " * 100, "x" * 9000, "{'a':1}"]
        )
    else:
        order = rng.choice(["True", "False", "1", "None"])
        text = f"{{'descr': '{rng.choice(_TYPES)}', 'fortran_order': {order}, 'shape': {rng.choice(_SHAPES)}, }}\n"
    if rng.random() < 0.1:
        magic = b"\x93NUMPY" + bytes([rng.choice([0, 2, 3, 255]), 0])
    return _joined(magic, text.encode(), values)
