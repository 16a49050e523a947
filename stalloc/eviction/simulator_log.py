"""Logs of the DTR simulator as instructions; stalloc.trace.sources.dtr_log reads the same file for lifespans alone.

Source: Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, appendix on the simulator's log. It begins where
`ANNOTATE` says `START`, and names that were given before may be released in it. A constant stays, since something that
was made from it may have to be made again. A call that changes a tensor makes a new storage of the same size there
(copy on write), or, `in_place`, a view of the old one, as Coop has it.
"""

from pathlib import Path
from typing import Any

from stalloc.errors import BadInputError
from stalloc.eviction.instructions import Instructions, InstructionWriter
from stalloc.trace.sources.dtr_log import WRITE_AGAIN, follow_log
from stalloc.trace.sources.events import MAX_SIZE_BYTES

_MOST_IN_ALL = 1 << 60  #: bytes of all storages, and ticks of all calls: twice as much still fits into 64 bits


def read_simulator_log(path: Path, data: bytes, *, in_place: bool = False) -> Instructions:
    """The instructions of a log. Raises BadInputError naming the line that fits none before it."""
    reader = _Reader(in_place)
    follow_log(path, data, reader.follow)
    if reader.not_described:
        raise BadInputError(
            f"{path}: the log ends before it says how large {reader.not_described[0][:30]!r} is: {WRITE_AGAIN}."
        )
    reader.keep_what_is_left()
    writer = reader.writer
    if not writer.ops:
        raise BadInputError(f"{path}: the log holds no calls, so nothing can be replayed: {WRITE_AGAIN}.")
    if max(sum(writer.sizes), sum(op[0] * len(op[3]) + op[0] for op in writer.ops)) > _MOST_IN_ALL:
        raise BadInputError(f"{path}: sizes or times are larger than any program's: {WRITE_AGAIN}.")
    return writer.done()


class _Reader:
    """Follows a log. A call is written when the sizes and views of all its results are known, which come after it."""

    def __init__(self, in_place: bool) -> None:
        self._in_place = in_place
        self._start()

    def _start(self) -> None:
        self.writer = InstructionWriter()
        self._waiting: list[str] = []  #: results of the last call that were not described yet
        self._tensor: dict[str, int] = {}
        self._named: dict[str, int] = {}  #: every name that was ever given, in that order, and its last tensor
        self._constant = ""
        self._told_bytes: dict[str, int] = {}
        self._call: tuple[int, list[int], list[str]] = (0, [], [])
        self._views: dict[str, int] = {}

    @property
    def not_described(self) -> list[str]:
        """Names of what was made last, and whose size is still to be told."""
        return self._waiting or ([self._constant] if self._constant else [])

    def follow(self, entry: dict[str, Any]) -> None:
        kind = entry["INSTRUCTION"]
        if kind in ("MEMORY", "ALIAS"):
            self._describe(kind, entry)
            return
        if self.not_described:
            raise ValueError(f"nothing says how large {self.not_described[0][:30]!r} is")
        if kind == "CONSTANT":
            self._constant = str(entry["NAME"])
        elif kind == "CALL":
            results = [str(name) for name in entry["RESULT"]]
            self._call = (_ticks(entry), [self._tensor[str(name)] for name in entry["ARGS"]], results)
            self._waiting, self._views = list(results), {}
            self._told_bytes = {}
            if not results:
                self._write_call()
        elif kind == "MUTATE":
            self._change(entry)
        elif kind == "COPY":
            self._name(str(entry["DST"]), self._tensor[str(entry["SRC"])])
            self.writer.hold(self._tensor[str(entry["DST"])])
        elif kind == "COPY_FROM":
            other = self._tensor[str(entry["SRC"])]
            self.writer.hold(other)
            if str(entry["DST"]) in self._tensor:
                self.writer.let_go(self._tensor.pop(str(entry["DST"])))
            self._name(str(entry["DST"]), other)
        elif kind == "RELEASE":
            if str(entry["NAME"]) in self._tensor:  # else it is of what was before the start
                self.writer.let_go(self._tensor.pop(str(entry["NAME"])))
        elif kind == "ANNOTATE":
            if entry["ANNOTATION"] == "START" and self._named:
                self._start()
        else:
            raise ValueError(f"unknown instruction {str(kind)[:30]!r}")

    def keep_what_is_left(self) -> None:
        """At the end, what the program still has a name for has to be there, by the order of names."""
        held = set(self._tensor.values())
        for tensor in dict.fromkeys(self._named.values()):
            if tensor in held:
                self.writer.keep(tensor)

    def _describe(self, kind: str, entry: dict[str, Any]) -> None:
        name = str(entry["NAME"])
        if kind == "MEMORY":
            num_bytes = int(entry["MEMORY"])
            if not 0 <= num_bytes <= MAX_SIZE_BYTES:
                raise ValueError(f"a storage of {num_bytes} bytes")
            if name == self._constant:
                self._constant = ""
                self._name(name, self.writer.constant(num_bytes))
            else:
                self._told_bytes[name] = num_bytes
            return
        self._waiting.remove(name)
        argument = int(entry["ALIAS"])
        self._views[name] = -1 if argument < 0 else self._call[1][argument]
        if argument < 0 and name not in self._told_bytes:
            raise ValueError(f"nothing says how large {name[:30]!r} is")
        if not self._waiting:
            self._write_call()

    def _write_call(self) -> None:
        ticks, args, results = self._call
        made = [(0 if self._views[name] >= 0 else self._told_bytes[name], self._views[name]) for name in results]
        for name, tensor in zip(results, self.writer.call(ticks, args, made), strict=True):
            self._name(name, tensor)

    def _change(self, entry: dict[str, Any]) -> None:
        names = [str(name) for name in entry["ARGS"]]
        args = [self._tensor[name] for name in names]
        changed = list(dict.fromkeys(int(number) for number in entry["MUTATE"]))
        if not all(0 <= number < len(names) for number in changed):
            raise ValueError("it changes what is no argument of it")
        made = [(0, args[one]) if self._in_place else (self.writer.size_of(args[one]), -1) for one in changed]
        for number, tensor in zip(changed, self.writer.call(_ticks(entry), args, made), strict=True):
            self.writer.let_go(self._tensor.pop(names[number]))
            self._name(names[number], tensor)

    def _name(self, name: str, tensor: int) -> None:
        if name in self._tensor:
            raise ValueError(f"tensor {name[:30]} is there already")
        self._tensor[name] = self._named[name] = tensor


def _ticks(entry: dict[str, Any]) -> int:
    ticks = int(entry["TIME"])
    if not 0 <= ticks <= _MOST_IN_ALL:
        raise ValueError(f"a call that takes {ticks}")
    return ticks
