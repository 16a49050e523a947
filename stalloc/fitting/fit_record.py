"""A fit: what was tried for a program and a budget, what it needed, and the settings and plan of the one that is used.

Contract: a fit file is data alone. Reading one runs no code of the file; its size is known before it is unpacked;
whatever is not a whole fit file is one BadInputError. What it says can only choose what is recomputed, and a plan in it
goes through the one door that all plans go through. The same fit is the same bytes.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.errors import BadInputError
from stalloc.files import write_whole
from stalloc.inputs import read_input
from stalloc.npz import DAMAGE, Columns
from stalloc.techniques.technique_settings import TechniqueSettings

FORMAT, VERSION = "stalloc fit", 4
SUFFIX = ".fit.npz"
_MAX_TEXT, _MAX_CANDIDATES = 2000, 1000


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the program, and what is known of it. Bytes are 0 where nothing was measured."""

    what: str  #: for people, such as "recompute 12 of 22 blocks"
    technique: str  #: the name that `stalloc policies` lists
    expected_bytes: int = 0  #: allocated at the peak, as predicted
    allocated_bytes: int = 0  #: allocated at the peak, as measured
    needed_bytes: int = 0  #: reserved at the peak by stalloc on its plan, from the first allocation
    native_bytes: int = 0  #: reserved at the peak by PyTorch's allocator
    host_bytes: int = 0  #: of pinned host memory at the most
    disk_bytes: int = 0  #: in files at the most
    added_seconds: float = 0.0  #: to each step, estimated
    factor: float = 1.0  #: by which the step's time grows, estimated
    checked: str = ""  #: how the bytes are known
    refused: str = ""  #: why it was not taken; empty if it could be run

    @property
    def runs_short(self) -> bool:
        """Whether it was refused for lack of memory alone, although its plan needs no more than the budget."""
        return bool(self.refused and self.needed_bytes)

    def fits(self, budget_bytes: int) -> bool:
        """Whether it was run within the budget."""
        return not self.refused and 0 < self.needed_bytes <= budget_bytes


def cheapest(candidates: Sequence[Candidate], budget_bytes: int) -> int:
    """The row of the candidate that costs the least time among those that fit; -1 if none fits."""
    fitting = [row for row, one in enumerate(candidates) if one.fits(budget_bytes)]
    return min(fitting, key=lambda row: (candidates[row].added_seconds, candidates[row].needed_bytes), default=-1)


def undominated(candidates: Sequence[Candidate]) -> list[int]:
    """The rows of the Pareto set: no other needs at most as much of device, host, disk and time, and less of one."""
    rows = [row for row, one in enumerate(candidates) if one.needed_bytes and not one.refused]
    measured = [candidates[row] for row in rows]
    costs = np.array([(one.needed_bytes, one.host_bytes, one.disk_bytes, one.added_seconds) for one in measured])
    return [
        row
        for row, cost in zip(rows, costs, strict=True)
        if not ((costs <= cost).all(axis=1) & (costs < cost).any(axis=1)).any()
    ]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What identifies the program that a fit was made for; it holds for no other."""

    name: str  #: of the script or module
    content: str  #: SHA-256 of the script
    arguments: tuple[str, ...]
    torch: str
    stalloc: str
    gpu: str  #: as the driver calls it; empty: any, since none was named

    def difference(self, other: "Program") -> str:
        """Why a fit of the other program may not hold for this one; empty if it does."""
        if other.content != self.content:
            return f"it was made for another program ({other.name}) or an older state of it"
        if other.arguments != self.arguments:
            return f"it was made for the arguments {' '.join(other.arguments) or '(none)'}"
        for what in ("torch", "stalloc", "gpu"):
            its = getattr(other, what)
            if getattr(self, what) != its and (its or what != "gpu"):
                return f"it was made for {what} {its}, and this is {getattr(self, what)}"
        return ""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What `stalloc fit` found."""

    program: Program
    budget_bytes: int
    gpu_bytes: int
    step_seconds: float  #: of the program as it is, estimated
    estimate: str  #: how seconds are estimated
    candidates: tuple[Candidate, ...]  #: the program as it is first
    best: int  #: the row that is used, -1: none fits
    settings: TechniqueSettings = field(default_factory=TechniqueSettings)  #: of the best candidate
    plan: bytes = b""  #: plan file of the best candidate; empty if its steps do not repeat
    notes: tuple[str, ...] = ()
    asked: str = ""  #: SHA-256 of what the first steps of the program as it is ask for; empty: not known

    @property
    def least_bytes(self) -> int:
        return min((one.needed_bytes for one in self.candidates if one.needed_bytes and not one.refused), default=0)

    def save(self, path: str | Path) -> None:
        """Write the fit to a file whose name ends in .fit.npz. Raises BadInputError if it cannot."""
        check_name(path)
        write_whole(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        told = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("settings", "plan")}
        header = {
            **told,
            "format": FORMAT,
            "version": VERSION,
            "program": asdict(self.program),
            "candidates": [asdict(one) for one in self.candidates],
            "settings": self.settings.as_json(),
        }
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        buffer = io.BytesIO()
        columns = {"header": np.frombuffer(text, np.uint8), "plan": np.frombuffer(self.plan, np.uint8)}
        np.savez(buffer, allow_pickle=False, **columns)
        return buffer.getvalue()


def check_name(path: str | Path) -> None:
    """Raise BadInputError unless a file is called as fits are, so that nothing else is written over."""
    if not str(path).endswith(SUFFIX):
        raise BadInputError(f"{path} does not end in {SUFFIX}: name the fit so that people know what it is.")


def load_fit(path: str | Path) -> Fit:
    """The fit in a file. Raises BadInputError for anything that is not a whole fit file."""
    path = Path(path)
    data = read_input(path, "a file that `stalloc fit` wrote")
    try:
        if not data.startswith(b"PK"):
            raise ValueError("it is no archive of columns")
        columns = Columns(io.BytesIO(data))
        return _fit(json.loads(_bytes(columns, "header").decode()), _bytes(columns, "plan"))
    except DAMAGE as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) and error.args else str(error)
        reason = (reason.splitlines() or ["it is damaged"])[0].rstrip(".")[:200]
    raise BadInputError(f"{path} is not a fit ({reason}): make one with stalloc fit.")


def _bytes(columns: Columns, name: str) -> bytes:
    column = columns[name]
    if column.dtype != np.uint8 or column.ndim != 1:
        raise ValueError(f"{name} is no column of bytes")
    return column.tobytes()


def _fit(header: Any, plan: bytes) -> Fit:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("its header does not say so")
    if header.get("version") != VERSION:
        raise ValueError(f"its format version is {header.get('version')!r:.20}, this stalloc reads {VERSION}")
    plain = {"budget_bytes": int, "gpu_bytes": int, "step_seconds": float, "estimate": str, "asked": str}
    fit = Fit(
        **{name: _checked(kind, header[name]) for name, kind in plain.items()},
        program=_record(Program, header["program"]),
        candidates=tuple(_record(Candidate, one) for one in _list(header["candidates"], _MAX_CANDIDATES)),
        best=header["best"],
        settings=TechniqueSettings.from_json(header["settings"]),
        plan=plan,
        notes=tuple(_checked(str, note) for note in _list(header["notes"], _MAX_CANDIDATES)),
    )
    if type(fit.best) is not int or not -1 <= fit.best < len(fit.candidates):
        raise ValueError("its best candidate is none of its candidates")
    return fit


def _record(kind: Any, told: Any) -> Any:
    if not isinstance(told, dict) or set(told) != {one.name for one in fields(kind)}:
        raise ValueError(f"a {kind.__name__.lower()} is damaged")
    values = {}
    for one in fields(kind):
        if one.type == tuple[str, ...]:
            values[one.name] = tuple(_checked(str, text) for text in _list(told[one.name], 100_000))
        else:
            values[one.name] = _checked(one.type, told[one.name])
    return kind(**values)


def _list(value: Any, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError("a list is damaged")
    return value


def _checked(kind: Any, value: Any) -> Any:
    """A value that is whole, as one of its kind."""
    what, is_whole = {
        str: ("a text", isinstance(value, str) and len(value) <= _MAX_TEXT),
        int: ("a number of bytes", type(value) is int and 0 <= value < 2**63),
        float: ("a number of seconds", type(value) in (int, float) and 0 <= value < 1e12),
    }[kind]
    if not is_whole:
        raise ValueError(f"{what} is damaged")
    return kind(value)
