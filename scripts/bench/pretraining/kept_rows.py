"""Rows that were measured, in a file: a run that is broken off loses nothing, and some can be measured anew."""

import json
from dataclasses import asdict
from pathlib import Path

from pretraining.cells import Cell
from pretraining.measuring import Row
from pretraining.recorded_step import Recorded
from stalloc.files import write_whole


class KeptRows:
    """The file; without a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[str, dict] = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}

    def find(self, cell: Cell) -> Row | None:
        """What is known of a cell."""
        kept = self._rows.get(cell.name)
        return Row(**kept | {"recorded": Recorded(**kept["recorded"])}) if kept else None

    def keep(self, cell: Cell, row: Row) -> None:
        """Add or replace a row, and write the file."""
        self._rows[cell.name] = asdict(row)
        if self._path is not None:
            write_whole(str(self._path), json.dumps(self._rows, indent=1) + "\n")
