"""Mutations of pickles: of the values they hold, and of the opcodes they are written in."""

import contextlib
import pickle
import pickletools
import random
from functools import lru_cache

from .texts import mutate_bytes, mutate_tree

_FRAME = 0x95
_NEVER_LOADED = b"R2cibobPQ\x81\x82\x83\x84\x93"  # of a mutation: what calls, and what doubles
_TUPLES, _MAX_TUPLES = b"t\x85\x86\x87", 1000  # the stock unpickler hashes tuples in tuples without a limit
_VALUES = tuple(b"KMJNIX\x8c]})"[number : number + 1] for number in range(10))
_GLOBALS = (
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"ccollections\nOrderedDict\n",
    b"ccollections\ndefaultdict\n",
    b"ccollections\nOrderedDict.fromkeys\n",
    b"cnumpy.core.multiarray\n_reconstruct\n",
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
    """A pickle with a value, its opcodes or its bytes changed."""
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
    return rng.choice(
        [
            *_NUMBERS,
            doubling,
            b"}" + doubling + b"Ns",
            b"]" * deep + b"a" * (deep - 1),
            b")" + b"\x85" * deep,
            b")" + b"\x85]0" * deep,
            b")" + b"\x85}0" * deep,
            b"}" + b"N}" * deep + b"s" * deep,
            b"(" + rng.choice([b"\x8f", b"]", b"}", b")", b"\x89"]) * many + rng.choice([b"l", b"t", b"\x91"]),
            b"\x8f(" + doubling + b"\x90",
            called,
            called + b")R",
            called + b"(" + doubling + b"tR",
            called + b")\x81",
            called + b")R}X\x01\x00\x00\x00ak\x00sb".replace(b"k", b"K"),
            (b"ccollections\ndefaultdict\nN}" + b"\x86R") * 1,
            (b"ccollections\ndefaultdict\n(") * deep + b")" + b"tR" * deep,
            (b"ccollections\nOrderedDict\n)RN") * deep + b"N" + b"s" * deep,
            b"]q\xffh\xffa",
            b"}q\xfeNh\xfes",
            b"h" + bytes([memo % 256]),
            b"j" + memo.to_bytes(4, "little"),
            b"Nr" + memo.to_bytes(4, "little"),
            b"Np" + str(memo).encode() + b"\n",
            b"N0" * many + b"N",
            b"X\x05\x00\x00\x00\x1b[2Jx",
            b"X\x03\x00\x00\x00\xed\xa0\x80",
            b"X\xff\xff\xff\x7f",
            b"\x8d" + b"\xff" * 8,
            b"\x96" + (2**40).to_bytes(8, "little"),
            b"\x8b\xff\xff\xff\x7f",
            b"\x82\x01",
            b"Pid\n",
            b"NQ",
            b"\x97",
            b"(i" + called[1:],
            b"(" + called + b"o",
            b"X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93",
        ]
    )
