"""Write down all that programs ask of an allocator: python recording.py DEVICES, the programs on standard input.

Contract: rows are in the order in which they came, each with the device that it is for; what the program does depends
on no plan, since none is made. Blocks have numbers, from 1 on. A block that other streams use is freed where the last
of them was done with it.
"""

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ablation.rows import FREE, MALLOC, REFUSED, Row
from stalloc import device as devices
from stalloc.cli.program import run_program
from stalloc.core.constants import ACTION_ALLOC, ACTION_FREE_COMPLETED, ACTION_OOM
from stalloc.integrations.installing import install
from stalloc.runtime.runtime_settings import Settings

HARM_PROGRAMS = Path(__file__).resolve().parents[1] / "harm_programs"
MEMORY_BYTES = 80 << 30
_CALLS = {"expect_persistent": Row.EXPECT_LASTING, "end_persistent": Row.END_LASTING, "expect_marks": Row.EXPECT_MARKS}


class Writer:
    """What comes between requests, by the number of events before it on its device."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.rows: list[tuple[int, ...]] = []  # device, events before, Row, number of a name, processor time
        self.names: dict[str, int] = {}
        for name, row in _CALLS.items():
            self._follow(runtime, name, lambda of, row=row: self.note(row, of))
        self._follow(runtime, "mark", lambda _, name, of=None: self.note(Row.MARK, of, name))
        for controller in runtime.controllers:
            self._follow(controller.memory, "release_unused", partial(self._note_release, controller.device.index))

    def _follow(self, owner: Any, name: str, note: Callable[..., None]) -> None:
        function = getattr(owner, name)

        def follow(*arguments: Any, **named: Any) -> None:
            note(*arguments, **named)
            function(*arguments, **named)

        setattr(owner, name, follow)

    def _note_release(self, index: int, *_: int) -> None:
        if sys._getframe(2).f_globals["__name__"].startswith("stalloc.integrations"):
            self.note(Row.RELEASE, [index])

    def note(self, row: Row, of: Any = None, name: str = "") -> None:
        number = self.names.setdefault(name, len(self.names))
        for controller in self._runtime.controllers:
            index = controller.device.index
            if of is None or index in of:
                num_events = int(controller.state.record.log.num_events)
                self.rows.append((index, num_events, int(row), number, time.process_time_ns()))

    def result(self) -> dict[str, Any]:
        controllers = self._runtime.controllers
        columns = [_of_device(one, [row[1:] for row in self.rows if row[0] == one.device.index]) for one in controllers]
        device = np.concatenate([np.full(len(rows), index) for index, rows in enumerate(columns)])
        return {"rows": np.concatenate(columns), "device": device, "names": np.array(list(self.names) or [""])}


def _of_device(controller: Any, between: list[tuple[int, ...]]) -> np.ndarray:
    """(n, 4): what (MALLOC, … or a Row), block or number of a name, bytes or nanoseconds, stream's handle."""
    state = controller.state
    events = state.recorded()
    assert state.first_event == 0, "the record is not whole"
    raw = state.tables.streams["value"][: state.record.lookup.num_streams].tolist()
    live: dict[int, int] = {}
    rows: list[tuple[int, int, int, int]] = []
    between = [*between, (1 << 60, 0, 0, 0)]
    following, block = 0, 0
    for number, (tag, address, size) in enumerate(
        zip(events["action"].tolist(), events["address"].tolist(), events["requested_bytes"].tolist(), strict=True)
    ):
        while between[following][0] <= number:
            rows.append((*between[following][1:], 0))
            following += 1
        action, stream = tag & 0xFF, raw[tag >> 8] if tag >> 8 < len(raw) else 0
        if action == ACTION_ALLOC:
            block += 1
            live[address] = block
            rows.append((MALLOC, block, size, stream))
        elif action == ACTION_FREE_COMPLETED:
            rows.append((FREE, live.pop(address), 0, 0))
        elif action == ACTION_OOM:
            rows.append((REFUSED, 0, size, stream))
    rows += [(*more[1:], 0) for more in between[following:-1]]
    return np.array(rows, np.int64).reshape(-1, 4)


def gpu_of(num_devices: int) -> devices.VirtualGPU:
    return devices.VirtualGPU(name="of an ablation", total_bytes=MEMORY_BYTES, num_devices=num_devices)


def record(result: str, num_devices: int, program: list[str]) -> int:
    runtime = install(device="virtual", gpu=gpu_of(num_devices), settings=Settings(plan=False, keep_recording=True))
    writer = Writer(runtime)
    if Path(program[0]).resolve().parent == HARM_PROGRAMS:
        sys.path.insert(0, str(HARM_PROGRAMS))
        import steps  # type: ignore[import-not-found]

        steps.listeners.append(partial(writer.note, Row.STEP_END, None))
    code = run_program(program)
    if code == 0:
        unfinished = f"{result}.{os.getpid()}.npz"
        np.savez_compressed(unfinished, **writer.result())
        os.replace(unfinished, result)
    return code


def main() -> None:
    """Record the programs that standard input names, a line of JSON each, in forks: importing torch takes longest."""
    devices.activate("virtual", gpu_of(int(sys.argv[1])))
    for name in ("torch", "torch._dynamo", "cupy"):
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        result, program = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = record(result, int(sys.argv[1]), program)
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps([result, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]), flush=True)


if __name__ == "__main__":
    main()
