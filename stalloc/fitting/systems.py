"""Published systems that let a program need less memory, and which part of each stalloc implements: `systems.csv`.

Contract: a status says what is done, not what is meant to be. "executes": runs for real; "in part": so does the part of
it that is named, and what the system is about is not there as a whole; "emulates": runs, with a stand-in for hardware;
"replays": on a trace; "reports": a figure from a formula.
"""

import csv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class System:
    """One system, by the name that `stalloc fit --policy` takes where it executes within a fit."""

    name: str
    source: str  #: who published it
    does: str
    status: str
    where: str = ""  #: what to type


with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as _rows:
    SYSTEMS = tuple(System(**row) for row in csv.DictReader(_rows))
