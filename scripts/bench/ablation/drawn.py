"""Random programs as recordings, with what torch's models need for them: python drawn.py FOLDER TRACES NUMBER.

Contract: as harm.random_programs; a program that is there is not drawn again.
"""

import sys
from pathlib import Path

import numpy as np
from harm.random_programs import (
    MODELS,
    RandomProgram,
    draw,
    draw_changing,
    kept_sources,
    least_capacity,
    reserved_bytes,
)

from ablation.rows import FREE, MALLOC, Row


def rows_of(program: RandomProgram) -> np.ndarray:
    """(n, 4) as recording.py writes them; each step is marked."""
    rows = [(int(Row.EXPECT_MARKS), 0, 0, 0)]
    at = 0
    for end in program.step_ends:
        for event in program.events[at:end].tolist():
            if event > 0:
                rows.append((MALLOC, event, int(program.size[event - 1]), 0))
            else:
                rows.append((FREE, -event, 0, 0))
        rows += [(int(Row.MARK), 0, 0, 0), (int(Row.STEP_END), 0, 0, 0)]
        at = end
    return np.array(rows, np.int64)


def main() -> None:
    folder, traces, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    for seed in range(1, number + 1):
        for kind, draw_one, needs in (("tight", draw, least_capacity), ("changing", draw_changing, reserved_bytes)):
            file = folder / f"{kind}-{seed}.npz"
            if file.exists():
                continue
            program = draw_one(seed, kept_sources(traces))
            rows = rows_of(program)
            better = np.array(min(needs(program, name) for name in MODELS))
            sizes = {"better_bytes": better, "load_bytes": np.array(program.load_bytes)}
            device = np.zeros(len(rows), np.int64)
            np.savez_compressed(file, rows=rows, device=device, names=np.array([""]), **sizes)


if __name__ == "__main__":
    main()
