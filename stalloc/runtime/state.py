"""The state of a device under its old names, until the policy files use the new ones."""

from typing import Any

from stalloc.core import state
from stalloc.core.record_types import offset_of
from stalloc.core.records import State
from stalloc.core.state import Step
from stalloc.runtime.layout import PATHS

__all__ = ["DeviceState", "Step"]


class DeviceState(state.DeviceState):
    def __getitem__(self, name: str) -> int:
        found: Any = self.record
        for part in PATHS[name].split("."):
            found = getattr(found, part)
        return int(found)

    def __setitem__(self, name: str, value: int) -> None:
        self.memory.view("i8")[offset_of(State, PATHS[name]) // 8] = value

    def write(self, **fields: int) -> None:
        self._write_paths({PATHS.get(name, name): value for name, value in fields.items()})

    def span_peak(self, what: str) -> int:
        return self.allocated_peak_bytes if what == "ALLOCATED" else self.reserved_peak_bytes

    def take_free_segments(self, idle_passes: int = 0) -> dict[int, int]:
        return self.remove_free_segments(idle_passes)

    def fence(self, bases: list[int]) -> bool:
        return self.retire(bases)

    hand_over = state.DeviceState.share_cells
    streams = property(lambda self: self.tables.streams["value"])

    def recorded(self) -> Any:
        return super().recorded().view("i8").reshape(-1, 4)

    def tape_entries(self) -> Any:
        return [] if self.tape is None else self.tape.entries
