"""What a shared library asks of others, read from its ELF file: no binutils, nothing is loaded or run.

Contract: 64-bit little-endian ELF only (x86-64, AArch64); a file that is something else has no sections and answers
with empty results. Layout after the System V ABI, "Object Files", and the LSB's chapter on symbol versioning.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_SHT_SYMTAB, _SHT_DYNAMIC, _SHT_DYNSYM, _SHT_VERNEED, _SHT_VERSYM = 2, 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
_DT_NEEDED = 1
_STT_FUNC = 2


@dataclass(frozen=True)
class Requirement:
    """A symbol that a library leaves undefined, with the version and library it names, if any."""

    name: str
    version: str | None
    library: str | None


@dataclass(frozen=True)
class Function:
    """A function that a library defines: its offset from the load address and its length."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class _Section:
    kind: int
    data: memoryview
    link: int


class ElfFile:
    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._sections: list[_Section] = []
        if content[:6] == b"\x7fELF\x02\x01":
            table_offset = struct.unpack_from("<Q", content, 40)[0]
            entry_bytes, num_sections = struct.unpack_from("<HH", content, 58)
            view = memoryview(content)
            for index in range(num_sections):
                kind, offset, size, link = struct.unpack_from("<4xI16xQQI", content, table_offset + index * entry_bytes)
                self._sections.append(_Section(kind, view[offset : offset + size], link))

    def __enter__(self) -> "ElfFile":
        return self

    def __exit__(self, *_: object) -> None:
        for section in self._sections:
            section.data.release()

    def _of_kind(self, kind: int) -> tuple[memoryview, bytes] | None:
        """The first section of a kind, and the strings that it refers to."""
        section = next((section for section in self._sections if section.kind == kind), None)
        return (section.data, bytes(self._sections[section.link].data)) if section else None

    def needed_libraries(self) -> list[str]:
        if not (dynamic := self._of_kind(_SHT_DYNAMIC)):
            return []
        data, strings = dynamic
        pairs = np.frombuffer(data, dtype="<u8").reshape(-1, 2).tolist()
        return [_text(strings, value) for tag, value in pairs if tag == _DT_NEEDED]

    def needed_versions(self) -> dict[int, tuple[str, str]]:
        """Version index → (version, library that has to define it)."""
        if not (section := self._of_kind(_SHT_VERNEED)):
            return {}
        (data, strings), versions, at, following = section, {}, 0, 1
        while following:
            num_entries, library, entry, following = struct.unpack_from("<2xHIII", data, at)
            entry_at = at + entry
            for _ in range(num_entries):
                index, name, next_entry = struct.unpack_from("<6xHII", data, entry_at)
                versions[index & 0x7FFF] = (_text(strings, name), _text(strings, library))
                entry_at += next_entry
            at += following
        return versions

    def requirements(self) -> list[Requirement]:
        """Every undefined symbol of the dynamic symbol table."""
        if not (section := self._of_kind(_SHT_DYNSYM)):
            return []
        (data, strings), versions = section, self.needed_versions()
        symbols = np.frombuffer(data, dtype=_SYMBOL)
        of_versions = self._of_kind(_SHT_VERSYM)
        indices = np.frombuffer(of_versions[0], dtype="<u2") if of_versions else np.zeros(len(symbols), "<u2")
        found = []
        for position in np.flatnonzero((symbols["section"] == 0) & (symbols["name"] != 0)).tolist():
            version, library = versions.get(int(indices[position]) & 0x7FFF, (None, None))
            found.append(Requirement(_text(strings, int(symbols["name"][position])), version, library))
        return found

    def functions(self, prefixes: tuple[bytes, ...]) -> dict[str, Function]:
        """Functions defined in the file whose name starts with one of `prefixes`, local ones included."""
        found: dict[str, Function] = {}
        for data, strings in filter(None, map(self._of_kind, (_SHT_DYNSYM, _SHT_SYMTAB))):
            symbols = np.frombuffer(data, dtype=_SYMBOL)
            defined = symbols[((symbols["info"] & 15) == _STT_FUNC) & (symbols["section"] != 0)]
            for name, offset, size in defined[["name", "value", "size"]].tolist():
                if strings.startswith(prefixes, name):
                    found[_text(strings, name)] = Function(offset, size)
        return found


def _text(strings: bytes, start: int) -> str:
    return strings[start : strings.index(b"\0", start)].decode("ascii", "replace")
