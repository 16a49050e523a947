"""Ranks of configurations of models: what is measured of each, a file of it, and on which devices they run.

Letters of a configuration: N nothing, R recomputation of every layer, V a virtual pipeline of two stages a rank, Z the
optimizer sharded over eight ranks (ZeRO), O the optimizer offloaded to the processor.

Contract: of the run under stalloc, bytes are those that the virtual driver handed out, watched steps included. What
torch and GMLake would have, what a step takes and plans of it are of one recording by `stalloc record --ops`, which
runs torch's default allocator on a virtual GPU: what that reserved was seen, what others would have is by their models.
Seconds of steps are estimates: a step takes what the slower of the measured ranks does, plus the bubble of the
pipeline; a configuration runs on devices of a size if all ranks of the pipeline complete there, each run for itself.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from harm.catalogue import ROOT, Program
from harm.running import Setting, last_line, run
from planning import cases as planning_cases
from planning.baselines import stalloc_paper
from planning.baselines.placing import Column
from planning.judging import judged

from stalloc.cost.gpu_rates import rates_of
from stalloc.cost.host_rates import ADAM_PARAMETERS_PER_SECOND
from stalloc.cost.queues import Queue
from stalloc.cost.step_seconds import estimate_step
from stalloc.files import write_whole
from stalloc.lifespans import lower_bound
from stalloc.lifespans.roles import within
from stalloc.lifespans.steady_step import SteadyStep, recorded_step
from stalloc.planner import plan
from stalloc.replay.simulation import Candidate, least_memory, run_one
from stalloc.trace import Trace, load_traces
from stalloc.trace.operations import Operations, RangeKind

DENSE, MIXTURES = ("gpt2", "llama"), ("qwen", "mixtral")
GROUPS = {"dense": DENSE, "moe": MIXTURES} | {model: (model,) for model in (*DENSE, *MIXTURES)}  #: what --only takes
CONFIGURATIONS = ("N", "R", "V", "VR", "ZR", "ZOR")
PIPELINE_RANKS, MICROBATCHES, STAGES_OF_A_RANK = 4, 8, 2
RANKS = (0, PIPELINE_RANKS - 1)  #: the first holds the activations of most microbatches, the last the logits
SCRIPT = Path("scripts/bench/paper_programs/pipeline_rank.py")


@dataclass(frozen=True)
class Cell:
    model: str
    configuration: str
    rank: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.configuration} {self.rank}"

    def program(self, steps: int, options: tuple[str, ...] = ()) -> Program:
        more = ("--rank", str(self.rank), "--steps", str(steps), *options)
        return Program(self.name, SCRIPT, (self.model, self.configuration, *more))


def bubble(configuration: str) -> float:
    """Idle time of a rank, by the time that it works: (ranks - 1) / (microbatches x stages of a rank).

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC '21.
    """
    return (PIPELINE_RANKS - 1) / (MICROBATCHES * (STAGES_OF_A_RANK if "V" in configuration else 1))


GPU, MEMORY = "H100", "1TiB"  #: whose rates are used; more memory than any configuration asks for
NATIVE, EXPANDABLE = Candidate("torch"), Candidate("expandable")
#: the last stitches for all that is not small
MODELLED = {"expandable": EXPANDABLE, "gmlake": Candidate("gmlake")}
MODELLED["eager_gmlake"] = Candidate("gmlake", "fragmentation_limit:2097152")
_ALIGNMENT = 512
_GRADIENT_BYTES = 4  #: of a parameter, where the processor updates it


class RecordingError(Exception):
    """The program could not be recorded; says why."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Figures of a recording; plans are of its last step that operations cover, without what lives throughout."""

    allocated_bytes: int  #: peak, as torch rounds requests
    native_bytes: int  #: reserved at the peak by torch's default, as are the three that follow
    expandable_bytes: int
    gmlake_bytes: int  #: with the settings that it is published with
    eager_gmlake_bytes: int
    native_least_bytes: int  #: memory in which torch's default completes
    expandable_least_bytes: int
    pipeline_seconds: float  #: forward and backward of all microbatches, without waiting for other ranks
    update_seconds: float  #: the rest of the step
    requests: int  #: of the step
    phases: int
    load_bytes: int  #: no plan of the step is lower
    paper_bytes: int  #: the plan by the paper's published method
    paper_seconds: float
    plan_bytes: int  #: stalloc's plan
    plan_seconds: float


def look_at(program: Program) -> Recorded:
    trace = _record(program)
    operations, step = recorded_step(trace)
    edges = phase_edges(operations, step)
    pipeline, update = _seconds(trace, operations, step)
    case = _case(program.name, trace, step, edges)
    load = case.load_bytes
    began = time.perf_counter()
    by_paper = judged(case, stalloc_paper.place(case.start, case.end, case.size, phase_edges=edges), load)
    paper_seconds = time.perf_counter() - began
    began = time.perf_counter()
    ours = judged(case, plan((case.start, case.end, case.size), alignment=_ALIGNMENT).offset, load)
    plan_seconds = time.perf_counter() - began
    reserved = {f"{name}_bytes": run_one(trace, one).peak_reserved_bytes for name, one in MODELLED.items()}
    return Recorded(
        **reserved,
        allocated_bytes=lower_bound(trace),
        native_bytes=int(trace.reserved_bytes().max()),
        native_least_bytes=least_memory(trace, NATIVE),
        expandable_least_bytes=least_memory(trace, EXPANDABLE),
        pipeline_seconds=pipeline,
        update_seconds=update,
        requests=len(case.size),
        phases=len(edges),
        load_bytes=load,
        paper_bytes=by_paper,
        paper_seconds=paper_seconds,
        plan_bytes=ours,
        plan_seconds=plan_seconds,
    )


def _record(program: Program) -> Trace:
    with tempfile.TemporaryDirectory(prefix="stalloc-") as folder:
        file = Path(folder) / "rank.trace.npz"
        options = ("--ops", "-o", str(file), "--device", "virtual", "--memory", MEMORY)
        command = [sys.executable, "-P", "-m", "stalloc", "record", *options, str(program.script), *program.arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RecordingError(f"{program.name} was not recorded: {last_line(done.stderr)}")
        return load_traces(file)[0]


def phase_edges(operations: Operations, step: SteadyStep) -> Column:
    """(k,) events at which a phase begins: each stage's forward and backward pass of each microbatch, and the rest.

    Nodes of one backward pass run from the last operation of the forward pass to the first, so that one with a later
    operation than the node before it begins another pass.
    """
    inside = (operations.begin >= step.begin_event) & (operations.end <= step.end_event)
    in_backward = within(operations, RangeKind.BACKWARD)
    kinds = [module.kind for module in operations.modules]
    is_stage = np.array([kind == "Stage" for kind in kinds] + [False])[operations.module]  # the last is for none
    forward = np.flatnonzero(inside & ~in_backward & (operations.kind == RangeKind.MODULE) & is_stage)
    nodes = np.flatnonzero(inside & (operations.kind == RangeKind.BACKWARD))
    nodes = nodes[np.argsort(operations.begin[nodes], kind="stable")]
    known = nodes[operations.sequence[nodes] >= 0]
    turns = np.flatnonzero(np.diff(operations.sequence[known]) > 0) + 1
    backward = known[np.append(0, turns)] if len(known) else known
    ends = [operations.end[forward], operations.end[nodes[-1:]]]
    edges = np.concatenate([[step.begin_event], operations.begin[forward], operations.begin[backward], *ends])
    return np.unique(edges).astype(np.int64)


def _seconds(trace: Trace, operations: Operations, step: SteadyStep) -> tuple[float, float]:
    """What forward and backward take on one rank that never waits, and the rest of the step."""
    estimated = estimate_step(trace, rates_of(GPU))
    assert estimated is not None, "there is a step"
    of_models = (operations.module >= 0) | within(operations, RangeKind.BACKWARD)
    rows = np.flatnonzero(of_models[estimated.operations])
    begin, end = estimated.schedule.begin[rows[0]], estimated.schedule.end[rows[-1]]
    tasks = zip(estimated.operations, estimated.by_data, strict=True)
    copied = [row for row, task in tasks if task.queue == Queue.TO_HOST]
    updated = sum(int(operations.shape_written_bytes[operations.shape[row]]) for row in copied) // _GRADIENT_BYTES
    rest = estimated.seconds - (end - begin) + updated / ADAM_PARAMETERS_PER_SECOND
    return end - begin, rest


def _case(name: str, trace: Trace, step: SteadyStep, edges: Column) -> planning_cases.Case:
    rows = step.requests
    size = trace.aligned_size(_ALIGNMENT)[rows]
    start, end = trace.start[rows], np.minimum(trace.end[rows], step.end_event)
    kept = (size > 0) & (end > start)
    start, end, size = (np.array(column[kept], np.int64) for column in (start, end, size))
    return planning_cases.Case("recorded step", name, start, end, size, _ALIGNMENT, edges)


AMPLE_BYTES = 1 << 40


class MeasuringError(Exception):
    """The run failed with memory enough; says why."""


@dataclass(frozen=True, kw_only=True)
class Row:
    date: str  #: on which it was measured
    steps: int
    stalloc_bytes: int  #: reserved at the peak
    hit_rate: float  #: of requests that are the same in each step, in the later half of the steps
    recorded: Recorded


def measure(cell: Cell, steps: int, options: tuple[str, ...] = ()) -> Row:
    """Run it under stalloc, then record it. Raises MeasuringError or RecordingError."""
    program = cell.program(steps, options)
    outcome = run(program, Setting.STALLOC, AMPLE_BYTES)
    if not outcome.is_complete:
        raise MeasuringError(f"{cell.name} under stalloc: {outcome.last_line}")
    ran = outcome.seen["steps"]
    before, last = ran[len(ran) // 2 - 1], ran[-1]
    hits, misses = (last[name] - before[name] for name in ("hits", "misses"))
    return Row(
        date=time.strftime("%Y-%m-%d"),
        steps=steps,
        stalloc_bytes=outcome.peak_bytes,
        hit_rate=hits / (hits + misses) if last["on_plan"] and hits + misses else 0.0,
        recorded=look_at(program),
    )


class KeptRows:
    """The file; without a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[str, dict] = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}

    def find(self, cell: Cell) -> Row | None:
        kept = self._rows.get(cell.name)
        return Row(**kept | {"recorded": Recorded(**kept["recorded"])}) if kept else None

    def keep(self, cell: Cell, row: Row) -> None:
        self._rows[cell.name] = asdict(row)
        if self._path is not None:
            write_whole(str(self._path), json.dumps(self._rows, indent=1) + "\n")


MIB = 1 << 20
ALLOCATORS = (Setting.DEFAULT, Setting.EXPANDABLE, Setting.STALLOC)
_EVEN_BYTES = 10 * MIB  #: sizes of devices are whole ones of these where that makes no difference


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a configuration of a model needs of each device of the pipeline, and what its step takes."""

    model: str
    configuration: str
    seconds: float  #: of a step, estimated
    native_bytes: int  #: the least memory, by replay
    expandable_bytes: int
    stalloc_bytes: int  #: what was reserved with memory enough

    @property
    def torch_bytes(self) -> int:
        return min(self.native_bytes, self.expandable_bytes)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A size of device on which stalloc alone should run the faster configuration."""

    device_bytes: int
    faster: Need
    other: Need  #: the fastest that runs under one of torch's settings

    @property
    def gain(self) -> float:
        return self.other.seconds / self.faster.seconds - 1


@dataclass(frozen=True, kw_only=True)
class Verdict:
    case: Case
    ended: Mapping[Setting, str]  #: of the faster configuration: "" if all ranks complete, else which does not and why
    other_runs: str  #: the setting of torch's under which all ranks of the other configuration complete; "" if none

    @property
    def is_confirmed(self) -> bool:
        alone = {setting for setting, why in self.ended.items() if not why} == {Setting.STALLOC}
        return alone and bool(self.other_runs)


def needs(rows: Mapping[Cell, Row], model: str) -> list[Need]:
    found = []
    for configuration in CONFIGURATIONS:
        of_ranks = [rows.get(Cell(model, configuration, rank)) for rank in RANKS]
        ranks = [row for row in of_ranks if row is not None]
        if len(ranks) == len(RANKS):
            recorded, factor = [row.recorded for row in ranks], 1 + bubble(configuration)
            seconds = max(one.pipeline_seconds * factor + one.update_seconds for one in recorded)
            native = max(one.native_least_bytes for one in recorded)
            least = {"native_bytes": native, "expandable_bytes": max(one.expandable_least_bytes for one in recorded)}
            ours = max(row.stalloc_bytes for row in ranks)
            found.append(Need(model=model, configuration=configuration, seconds=seconds, stalloc_bytes=ours, **least))
    return found


def cases(of_model: list[Need]) -> Iterator[Case]:
    """Sizes of devices between what stalloc and what torch needs, where torch runs slower configurations alone."""
    for faster in of_model:
        size = -(-faster.stalloc_bytes // _EVEN_BYTES) * _EVEN_BYTES
        if size >= faster.torch_bytes:
            size = faster.stalloc_bytes
        if size >= faster.torch_bytes:
            continue
        fitting = [need for need in of_model if need.torch_bytes <= size]
        if fitting and (other := min(fitting, key=lambda need: need.seconds)).seconds > faster.seconds:
            yield Case(device_bytes=size, faster=faster, other=other)


def confirm(case: Case, steps: int, options: tuple[str, ...] = ()) -> Verdict:
    """Run all ranks of both configurations on devices of that size."""

    def why_not(need: Need, setting: Setting) -> str:
        for rank in sorted(range(PIPELINE_RANKS), key=RANKS.__contains__, reverse=True):  # what needs most comes first
            outcome = run(
                Cell(need.model, need.configuration, rank).program(steps, options), setting, case.device_bytes
            )
            if not outcome.is_complete:
                why = "runs out of memory" if "OutOfMemoryError" in outcome.last_line else outcome.last_line
                return f"rank {rank} {why} in step {len(outcome.seen.get('steps', ())) + 1}"
        return ""

    ended = {setting: why_not(case.faster, setting) for setting in ALLOCATORS}
    settings = [one for one in ALLOCATORS if one is not Setting.STALLOC]
    runs = next((one.value for one in settings if not why_not(case.other, one)), "")
    return Verdict(case=case, ended=ended, other_runs=runs)
