"""The instances of the table: recorded traces, published instances, made-up stages.

Contract: lifespans are not empty, sizes are positive and, for traces and stages, rounded up to 512 bytes; what a
loader refuses is named with its reason and never silently left out.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stalloc.errors import BadInputError
from stalloc.trace import load_traces

from .baselines.placing import Column
from .generator import KINDS, make

SHARED = Path(os.environ.get("STALLOC_SHARED") or Path(__file__).resolve().parents[3].parent / "shared")
CAPACITY = 1_048_576
#: small stages for a quick look, and what is large for each kind of target
QUICK_REQUESTS, MANY, A_MILLION = 8_000, 100_000, 1_000_000
SEVERAL = 10


@dataclass(frozen=True, eq=False)
class Case:
    """Lifespans [start, end) and sizes in bytes, each (n,)."""

    group: str  #: trace, minimalloc, idealloc or stage
    name: str
    start: Column
    end: Column
    size: Column
    alignment: int
    phase_edges: Column | None = None
    num_asked: int = 0  #: of a stage: the requests it was asked for
    num_steps: int = 0  #: of a stage

    @property
    def load_bytes(self) -> int:
        """The maximum of bytes live at once: no peak is lower."""
        change = np.concatenate([self.size, -self.size])
        is_start = np.repeat([1, 0], len(self.size))
        order = np.lexsort([is_start, np.concatenate([self.start, self.end])])
        return int(np.cumsum(change[order]).max(initial=0))

    def backwards(self) -> "Case":
        horizon = int(self.end.max())
        return replace(self, start=horizon - self.end, end=horizon - self.start)

    def shuffled(self, seed: int) -> "Case":
        rows = np.random.default_rng(seed).permutation(len(self.size))
        return replace(self, start=self.start[rows], end=self.end[rows], size=self.size[rows])


def recorded(folder: str, alignment: int, *, only: tuple[str, ...] = ()) -> Iterator[Case | str]:
    """The cases of a shared folder in order of name, one a device; a sentence for each file that cannot be read."""
    place = SHARED / folder
    if not place.is_dir():
        yield f"{folder}: absent: set STALLOC_SHARED to the folder that holds {folder}/."
        return
    for path in sorted(place.iterdir()):
        if path.is_dir() or path.suffix == ".md" or (only and not path.name.startswith(only)):
            continue
        try:
            traces = load_traces(path)
        except BadInputError as error:
            yield f"{path.name}: {str(error).removeprefix(f'{path}: ')}"
            continue
        for trace in traces:
            device = f", device {trace.device}" if len(traces) > 1 else ""
            size = trace.aligned_size(alignment)
            rows = np.flatnonzero((size > 0) & (trace.end > trace.start))
            name = path.name.removesuffix(".gz").removesuffix(".csv").removesuffix(f".{CAPACITY}") + device
            group = "trace" if folder == "traces" else "minimalloc" if str(CAPACITY) in path.name else "idealloc"
            if len(rows):
                start, end, size = (np.array(column[rows], np.int64) for column in (trace.start, trace.end, size))
                yield Case(group, name, start, end, size, alignment)


def stages(quick: bool) -> Iterator[Case]:
    """Made-up pipeline stages, several steps and one step alone."""
    for asked in (QUICK_REQUESTS,) if quick else (MANY, A_MILLION):
        for kind in KINDS:
            for num_steps in (SEVERAL, 1) if asked >= MANY else (1,):
                made = make(kind, asked, num_steps=num_steps)
                name = f"{made.name}, {asked // 1000:,}k"
                yield Case("stage", name, made.start, made.end, made.size, 512, made.phase_edges, asked, num_steps)
