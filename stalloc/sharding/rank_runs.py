"""Runs of a program for sharding, each in a fork: as it is, with marks; and as the first of many ranks.

Contract: this process is on the virtual GPU and has not used it. A rank runs alone, on a process group whose others are
not there (`sizing/fake_ranks.py`). `result.json` is written whole when the last step is over, which ends the child, or
never. What a program cannot do is a sentence, never an exception of the child's.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stalloc.device import VirtualGPU, virtual
from stalloc.errors import SetupError
from stalloc.files import write_whole
from stalloc.forked_child import ForkedChild, first_ended
from stalloc.sandbox import ProgramFiles
from stalloc.sharding.shard_ways import RankPeaks
from stalloc.sharding.step_marks import StepMarks
from stalloc.sizing.fake_ranks import Rank, be_rank
from stalloc.techniques.shard_settings import Layout

_NUM_STEPS = 4  # DDP makes its buckets anew in the second
_WATCHDOG_SECONDS = 0.25  # NCCL's watchdog lets go of what collectives have used ten times a second
_RESULT = "result.json"


@dataclass(frozen=True)
class RankWork:
    gpu: VirtualGPU
    layout: Layout | None = None  #: None: as it is, and marks are recorded
    rank: Rank | None = None
    is_whole_blocks: bool = False  #: every repeated block is recomputed as a whole


@dataclass(frozen=True)
class RankSeen(RankPeaks):
    failure: str = ""  #: why there is nothing else
    reserved_bytes: int = 0  #: by PyTorch's own allocator


class ShardRuns:
    """Runs of one program, a function that gives its exit code."""

    def __init__(self, program: Callable[[], int], files: ProgramFiles, limit_seconds: float) -> None:
        self._program, self._files, self._limit_seconds = program, files, limit_seconds

    def marks(self, work: RankWork) -> StepMarks:
        """The marks of a step as it is. Raises SetupError where the program cannot be recorded."""
        text, output = self._run(work)
        if text is None:
            raise SetupError(f"the program failed before its steps were recorded: {_why(output)}")
        found = StepMarks.from_json(json.loads(text))
        if not found.marks:
            raise SetupError(
                "no step could be recorded: the program needs a model that it calls, an optimizer of torch.optim and "
                "three steps."
            )
        return found

    def rank(self, work: RankWork) -> RankSeen:
        text, output = self._run(work)
        if text is None:
            return RankSeen(failure=_why(output))
        told = json.loads(text)
        if not told["steps"]:
            return RankSeen(failure="it made no step")
        (step, step_allocated), (making, making_allocated) = told["steps"][-1], told["making"]
        return RankSeen(step, making, step_allocated, making_allocated, reserved_bytes=told["reserved_bytes"])

    def _run(self, work: RankWork) -> tuple[str | None, str]:
        variables = {"STALLOC": "", "STALLOC_CACHE": "off", "STALLOC_TRIAL": "1"}
        if work.rank is not None:
            variables |= work.rank.variables()
        with ForkedChild(lambda place: _perform(place, self._program, work), variables, self._files.sandbox()) as child:
            ended = first_ended([child], self._limit_seconds)
            child.end()
            result = child.folder / _RESULT
            text = result.read_text(encoding="utf-8") if result.exists() else None
            output = child.output() if ended else f"it took more than {self._limit_seconds:g} s (--trial-seconds)"
        self._files.note(child.files)
        return text, output


def _why(output: str) -> str:
    errors = re.findall(r"^(?:[\w.]*Error|[\w.]*Exception): (.*)", output, re.MULTILINE)
    lines = [line for line in output.splitlines() if line.strip()]
    return (errors or lines or ["it said nothing"])[-1]


def _perform(folder: Path, program: Callable[[], int], work: RankWork) -> None:
    virtual.become(replace(work.gpu, num_devices=work.rank.num_local if work.rank is not None else 1))
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
    write_whole(folder / _RESULT, json.dumps(told))
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

    def take_peaks() -> tuple[int, int]:
        """The most bytes that were asked for, and allocated, since peaks were begun anew, as they are now."""
        stats = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        return stats.get("requested_bytes.all.peak", 0), stats.get("allocated_bytes.all.peak", 0)

    def divided(number: int, *_: Any) -> None:
        if not number:
            told["making"] = take_peaks()

    def stepped(optimizer: Any, *_: Any) -> None:
        first[:] = first or [optimizer]
        if optimizer is not first[0]:
            return
        time.sleep(_WATCHDOG_SECONDS)
        told["reserved_bytes"] = max(told["reserved_bytes"], torch.cuda.max_memory_reserved())
        told["steps"].append(take_peaks())
        if len(told["steps"]) >= _NUM_STEPS:
            _end(folder, told)

    Sharding(layout)
    when_models_appear(divided)  # after it
    register_optimizer_step_post_hook(stepped)
    return lambda: _end(folder, told)
