"""Mutations of bytes, lines and cells, JSON, values as JSON and pickles hold them, what gzip makes, .npz, pickles."""

import contextlib
import gzip
import io
import json
import math
import pickle
import pickletools
import random
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from functools import cache, lru_cache
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
        nested: Any = 0
        for number in range(rng.choice(DEPTHS)):
            nested = [nested] if number % 2 else {"a": nested}
        return rng.choice([[], {}, [value], {"": value}, [[value]] * 3, nested])
    return rng.choice(NUMBERS if choice < 6 else OTHERS)


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
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)  # refers to nothing before it
    return piece * num_mib + packer.flush()


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


_FRAME = 0x95
_NEVER_LOADED = b"R2cibobPQ\x81\x82\x83\x84\x93"  # of a mutation: what calls, and what doubles
_TUPLES, _MAX_TUPLES = b"t\x85\x86\x87", 1000  # the stock unpickler hashes tuples in tuples without a limit
_VALUES = tuple(b"KMJNIX\x8c]})"[number : number + 1] for number in range(10))
_GLOBALS = (
    *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"ccollections\nOrderedDict\n", b"ccollections\ndefaultdict\n"),
    *(b"ccollections\nOrderedDict.fromkeys\n", b"cnumpy.core.multiarray\n_reconstruct\n"),
    b"ctorch.storage\n_load_from_bytes\n",
)
_NUMBERS = (
    *(b"I01\n", b"I00\n", b"I-1\n", b"L99999999999999999999L\n", b"I" + b"9" * 5000 + b"\n", b"Fnan\n", b"Finf\n"),
    *(b"K\x00", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8a\x09" + b"\xff" * 8 + b"\x00"),
    b"\x8b" + (20_000).to_bytes(4, "little") + b"\x7f" * 20_000,
    b"G\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"N",
)


def mutate_pickle(rng: random.Random, data: bytes, other: bytes) -> bytes:
    choice = rng.random()
    if choice < 0.35:
        values = _values(rng, data)
        if values is not None:
            return values
    if choice < 0.9:
        return _mutate_opcodes(rng, data, other)
    return mutate_bytes(rng, data, other)


def _values(rng: random.Random, data: bytes) -> bytes | None:
    if data in _made or not _is_plain(data):
        return None
    try:
        values = mutate_tree(rng, pickle.loads(data))
        return pickle.dumps(values, protocol=rng.choice([2, 4]))
    except Exception:  # of many kinds, for what mutations have made of it
        return None


@lru_cache(maxsize=2048)
def _is_plain(data: bytes) -> bool:
    parts = _parsed(data)
    if any(part[:1] in _NEVER_LOADED for part in parts):
        return False
    return sum(part[:1] in _TUPLES for part in parts) <= _MAX_TUPLES


def opcodes(data: bytes) -> tuple[bytes, ...]:
    """The opcodes with their arguments, without frames, which only say how long they are; as far as it is a pickle."""
    if data in _made:  # by the mutation before this one
        return _made[data]
    return _parsed(data)


_made: dict[bytes, tuple[bytes, ...]] = {}


@lru_cache(maxsize=2048)
def _parsed(data: bytes) -> tuple[bytes, ...]:
    starts = []
    with contextlib.suppress(Exception):  # of many kinds, for what mutations have made of it
        for opcode, _, position in pickletools.genops(data):
            starts.append((position, opcode.code))
    places = [position for position, _ in starts] + [len(data)]
    parts = zip(starts, places[1:], strict=True)
    return tuple(data[position:end] for (position, code), end in parts if code != chr(_FRAME))


def _mutate_opcodes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    parts = list(opcodes(data)) or [b"."]
    at = rng.randrange(len(parts))
    match rng.randrange(9):
        case 0:
            del parts[at]
        case 1:
            parts[at:at] = parts[at : at + rng.choice([1, 1, 2, 5, 50])]
        case 2:
            another = rng.randrange(len(parts))
            parts[at], parts[another] = parts[another], parts[at]
        case 3:
            parts[at] = bytes([rng.randrange(256)]) + parts[at][1:]
        case 4:
            donor = opcodes(other) or (b"N",)
            begin = rng.randrange(len(donor))
            parts[at:at] = donor[begin : begin + rng.choice([1, 3, 20])]
        case 5 if len(parts[at]) > 1:
            parts[at] = parts[at][:1] + mutate_bytes(rng, parts[at][1:], other)
        case 6:
            parts.insert(at, hostile_value(rng))
        case _:  # in the place of a value, so that the rest still fits
            values = [number for number in range(at, min(at + 50, len(parts))) if parts[number][:1] in _VALUES]
            if values:
                parts[rng.choice(values)] = hostile_value(rng)
    _made.clear()
    made = b"".join(parts)
    _made[made] = tuple(parts)
    return made


def hostile_value(rng: random.Random) -> bytes:
    """Opcodes that push one value, built to cost more than they weigh, to nest, to call or to refer."""
    many, deep = rng.choice([10, 1000, 300_000]), rng.choice([10, 990, 5000, 200_000])
    memo = rng.choice([0, 5, 255, 2**16, 2**31 - 1])
    doubling = b")" + b"2\x86" * rng.choice([5, 20, 64])
    called = rng.choice(_GLOBALS)
    opened = rng.choice([b"\x8f", b"]", b"}", b")", b"\x89"]) * many + rng.choice([b"l", b"t", b"\x91"])
    return rng.choice(
        [
            *(*_NUMBERS, doubling, b"}" + doubling + b"Ns", b"\x8f(" + doubling + b"\x90", b"(" + opened),
            *(b"]" * deep + b"a" * (deep - 1), b")" + b"\x85" * deep, b")" + b"\x85]0" * deep, b")" + b"\x85}0" * deep),
            *(b"}" + b"N}" * deep + b"s" * deep, called, called + b")R", called + b"(" + doubling + b"tR"),
            *(called + b")\x81", called + b")R}X\x01\x00\x00\x00aK\x00sb", b"ccollections\ndefaultdict\nN}\x86R"),
            b"ccollections\ndefaultdict\n(" * deep + b")" + b"tR" * deep,
            b"ccollections\nOrderedDict\n)RN" * deep + b"N" + b"s" * deep,
            *(b"]q\xffh\xffa", b"}q\xfeNh\xfes", b"h" + bytes([memo % 256]), b"j" + memo.to_bytes(4, "little")),
            *(b"Nr" + memo.to_bytes(4, "little"), b"Np" + str(memo).encode() + b"\n", b"N0" * many + b"N"),
            *(b"X\x05\x00\x00\x00\x1b[2Jx", b"X\x03\x00\x00\x00\xed\xa0\x80", b"X\xff\xff\xff\x7f"),
            *(b"\x8d" + b"\xff" * 8, b"\x96" + (2**40).to_bytes(8, "little"), b"\x8b\xff\xff\xff\x7f", b"\x82\x01"),
            *(b"Pid\n", b"NQ", b"\x97", b"(i" + called[1:], b"(" + called + b"o"),
            b"X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93",
        ]
    )
