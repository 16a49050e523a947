"""What the child of a run for sharding does: records the marks of a step, or is one rank of many, and is measured.

Contract: `result.json` is written whole when the last step is over, which ends the process, or never.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stalloc.device import VirtualGPU
from stalloc.files import write_whole
from stalloc.sizing.fake_ranks import Rank, be_rank
from stalloc.techniques.technique_settings import Layout

NUM_STEPS = 4  #: DDP makes its buckets anew in the second
_WATCHDOG_SECONDS = 0.25  # NCCL's watchdog lets go of what collectives have used ten times a second
RESULT = "result.json"


@dataclass(frozen=True)
class RankWork:
    """One run."""

    gpu: VirtualGPU
    layout: Layout | None = None  #: None: as it is, and marks are recorded
    rank: Rank | None = None
    is_whole_blocks: bool = False  #: every repeated block is recomputed as a whole


def perform(folder: Path, program: Callable[[], int], work: RankWork) -> None:
    """Run the program, a function that gives its exit code, in this process, which is a fork for it."""
    from stalloc.device import virtual

    num_devices = work.rank.num_local if work.rank is not None else 1
    virtual.become(replace(work.gpu, num_devices=num_devices))
    if work.rank is not None:
        be_rank()
    if work.is_whole_blocks:
        from stalloc.techniques.sharding import recompute_whole_blocks

        recompute_whole_blocks()
    told = _measuring(folder, work.layout) if work.layout is not None else _watching(folder)
    code = program()
    if code != 0:
        sys.stdout.flush()
        raise SystemExit(code)
    told()


def _end(folder: Path, told: dict[str, Any]) -> None:
    write_whole(folder / RESULT, json.dumps(told))
    sys.stdout.flush()
    os._exit(0)


def _watching(folder: Path) -> Callable[[], None]:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from stalloc.sharding.marks_watch import WATCHED_STEP, StepWatch

    watch = StepWatch()

    def end() -> None:
        _end(folder, watch.told().as_json())

    register_optimizer_step_post_hook(lambda *_: end() if watch.num_steps > WATCHED_STEP else None)
    return end


def _measuring(folder: Path, layout: Layout) -> Callable[[], None]:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from stalloc.techniques.appearing import when_models_appear
    from stalloc.techniques.sharding import Sharding

    told: dict[str, Any] = {"making": (0, 0), "steps": [], "reserved_bytes": 0}
    first: list[Any] = []  # the optimizer whose steps count; ZeroRedundancyOptimizer has another inside

    def divided(number: int, *_: Any) -> None:
        if not number:
            told["making"] = _peaks()
            torch.cuda.reset_peak_memory_stats()

    def end() -> None:
        _end(folder, told)

    def stepped(optimizer: Any, *_: Any) -> None:
        first[:] = first or [optimizer]
        if optimizer is not first[0]:
            return
        time.sleep(_WATCHDOG_SECONDS)
        told["steps"].append(_peaks())
        told["reserved_bytes"] = max(told["reserved_bytes"], torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        if len(told["steps"]) >= NUM_STEPS:
            end()

    Sharding(layout)
    when_models_appear(divided)  # after it
    register_optimizer_step_post_hook(stepped)
    return end


def _peaks() -> tuple[int, int]:
    """The most bytes that were asked for, and allocated, since peaks were begun anew."""
    import torch

    told = torch.cuda.memory_stats()
    return told.get("requested_bytes.all.peak", 0), told.get("allocated_bytes.all.peak", 0)
