"""Plans that somebody changed to do harm, put in force by every way in, and small programs that run on them.

Contract: each address that a program gets lies in memory that the device gave out, and no two live requests share a
byte; else it is an AssertionError, and the soak has a finding. A plan either ends in one sentence (PlanError,
BadInputError) or the program runs.
"""

import contextlib
import dataclasses
import io
import tempfile
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.core.snapshot import segments
from stalloc.errors import StallocError
from stalloc.integrations.plan_cache import PlanCache
from stalloc.integrations.ranks import fits
from stalloc.lifespans.repeating_schedule import Schedule
from stalloc.planner import Plan, load_plans, plan_schedule, plans_from_bytes, plans_to_bytes, save_plans
from stalloc.planner.cycle import cycle_bound
from stalloc.replay.offline import let_go, make_controller
from stalloc.runtime.admission import admit
from stalloc.runtime.controller import Controller
from stalloc.runtime.runtime_settings import Settings

MIB = 1 << 20
_LARGEST = 256 * MIB  # of the requests that are made
_PASSES = 3


class Oracle:
    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._live: list[tuple[int, int]] = []
        self._held: list[tuple[int, int]] = []  # memory of the device
        self._version: tuple[int, ...] = ()  # what it was read at

    def add(self, address: int, size_bytes: int) -> None:
        end, record = address + size_bytes, self._controller.state.record
        counts, plan = record.statistics, record.plan
        version = counts.num_segment_allocs, counts.num_segment_frees, counts.num_segments, plan.arena
        if version != self._version:
            found = segments(self._controller.state)
            self._held, self._version = [(one.address, one.address + one.size_bytes) for one in found], version
        inside = any(low <= address and end <= high for low, high in self._held)
        assert inside, f"{address:#x}, +{size_bytes} is not ours"
        place = bisect_left(self._live, (address, end))
        for low, high in self._live[max(place - 1, 0) : place + 1]:
            assert end <= low or high <= address, f"{address:#x}, +{size_bytes} overlaps {low:#x}, +{high - low}"
        insort(self._live, (address, end))

    def remove(self, address: int) -> None:
        del self._live[bisect_left(self._live, (address, 0))]


@dataclass(frozen=True, eq=False)
class Program:
    """A step that repeats: entry i is requested in each pass and dies `lifespan[i]` requests later."""

    size: np.ndarray  #: (n,) bytes
    stream: np.ndarray  #: (n,) index
    lifespan: np.ndarray  #: (n,) requests, 1 to n

    @classmethod
    def of_plan(cls, plan: Plan) -> "Program":
        """What follows the schedule of a plan as far as its numbers make sense, whatever the plan says of lifespans."""
        count = len(plan.schedule_size)
        usable = (plan.schedule_size > 0) & (plan.schedule_size <= _LARGEST)
        usable &= (plan.schedule_stream >= 0) & (plan.schedule_stream < 8)
        return cls(plan.schedule_size[usable], plan.schedule_stream[usable], np.full(int(usable.sum()), count // 2 + 1))

    def schedule(self) -> Schedule:
        count, start = len(self.size), np.arange(len(self.size), dtype=np.int64)
        columns = {"size": self.size, "stream": self.stream, "start": start, "end": start + self.lifespan, "row": start}
        cycle = {"num_prologue": 0, "cycle_start": 0, "cycle_end": count}
        counts = {"covered_requests": 3 * count, "period_requests": count, "minimum_size": 513}
        return Schedule(**columns, planned=np.ones(count, bool), **cycle, **counts)

    def run(self, controller: Any, rng: np.random.Generator) -> None:
        """Run a few passes, with a request of some other size now and then, and free everything."""
        oracle, state = Oracle(controller), controller.state
        due: dict[int, list[int]] = {}
        clock = 0
        for _ in range(_PASSES):
            for size, stream, lifespan in zip(
                self.size.tolist(), self.stream.tolist(), self.lifespan.tolist(), strict=True
            ):
                for address in due.pop(clock, ()):
                    oracle.remove(address)
                    state.free(address)
                asked = [(size, stream, lifespan)]
                if rng.random() < 0.1:
                    asked.append((int(rng.integers(513, 8 * MIB)), 0, int(rng.integers(1, 20))))
                for size_bytes, index, stays in asked:
                    address = state.malloc(size_bytes, index)
                    if address:  # else memory has run out, as it may
                        oracle.add(address, size_bytes)
                        due.setdefault(clock + stays, []).append(address)
                clock += 1
        for addresses in due.values():
            for address in addresses:
                state.free(address)


def make_program(rng: np.random.Generator) -> Program:
    count = int(rng.integers(6, 24))
    size = (rng.choice(rng.integers(1, 4096, 5), count) * 1024 + 513).astype(np.int64)
    streams = rng.integers(0, 2, count) if rng.random() < 0.3 else np.zeros(count, np.int64)
    return Program(size, streams.astype(np.int64), np.minimum(rng.geometric(0.2, count), count).astype(np.int64))


CAPACITY_BYTES = 1 << 30
WAYS = ("file", "cache", "rank")
_SCHEDULE_COLUMNS = ("schedule_size", "schedule_stream", "schedule_start", "schedule_end", "schedule_offset")
_HEADER = ("alignment", "peak_bytes", "lower_bound_bytes", "num_prologue", "cycle_start", "cycle_end", "device")
_CHANGES, _SHARES = (*_SCHEDULE_COLUMNS, "empty", "moved", "header"), (0.1, 0.05, 0.05, 0.1, 0.2, 0.25, 0.2, 0.05)
_SPECIAL = (-(1 << 63), -(1 << 40), -512, -2, -1, 0, 1, 511, 512, 1 << 20, 1 << 40, 1 << 47, 1 << 61, 1 << 62)


@dataclass
class Findings:
    plans: int = 0
    refused: int = 0
    served: int = 0
    hits: int = 0  # requests that hostile plans placed
    reasons: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def soak_plans(count: int, seed: int) -> dict[str, Any]:
    """Put `count` changed plans in force, one after the other by all ways, and run their programs."""
    rng = np.random.default_rng(seed)
    findings = Findings()
    known: list[tuple[Program, Schedule, Plan]] = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(count):
            if index % 500 == 0:  # a plan is changed in many ways before there is another one
                known = [_planned(make_program(rng)) for _ in range(8)]
            program, schedule, plan = known[index % len(known)]
            way = WAYS[index % len(WAYS)]
            changed = _change(plan, rng)
            try:
                _one(changed, schedule, program, way, Path(folder) / "hostile.plan.npz", findings, rng)
            except Exception as error:
                findings.problems.append(f"seed {seed}, plan {index}, by {way}: {type(error).__name__}: {error}")
    return dataclasses.asdict(findings)


def _planned(program: Program) -> tuple[Program, Schedule, Plan]:
    schedule = program.schedule()
    return program, schedule, plan_schedule(schedule)


def _one(
    plan: Plan, schedule: Schedule, program: Program, way: str, file: Path, findings: Findings, rng: np.random.Generator
) -> None:
    """One plan by one way; what the program finds wrong is an AssertionError."""
    findings.plans += 1
    controller = make_controller(CAPACITY_BYTES, Settings(plan=False))
    try:
        _put_in_force(controller, plan, schedule, way, file)
    except StallocError as error:
        findings.refused += 1
        sentence = str(error)
        assert "\n" not in sentence, "the error is not one sentence"
        reason = next((word.rstrip(":") for word in sentence.split() if "-" in word and word.endswith(":")), "other")
        findings.reasons[reason] = findings.reasons.get(reason, 0) + 1
    else:
        findings.served += 1
    # what goes by the plan's own columns finds whatever place is amiss, the program whatever else is
    for requests in (program, Program.of_plan(plan)):
        requests.run(controller, rng)
    findings.hits += controller.state.record.follow.hits
    let_go(controller)


def _put_in_force(controller: Controller, plan: Plan, schedule: Schedule, way: str, file: Path) -> None:
    if way == "rank":
        (plan,) = plans_from_bytes(plans_to_bytes([plan]), "the job's store")
        # whoever writes the store of a job knows the schedule that is asked for
        columns = {name.removeprefix("schedule_"): getattr(plan, name) for name in _SCHEDULE_COLUMNS[:-1]}
        columns |= {name: getattr(plan, name) for name in ("num_prologue", "cycle_start", "cycle_end")}
        claimed = dataclasses.replace(schedule, planned=plan.schedule_offset >= 0, **columns)
        if not fits(plan, claimed):
            raise StallocError("bad-rank: the plan does not fit the schedule.")
        admitted = admit([plan], cycle_only=True)
        controller.put_in_force(admitted, plan)
        return
    save_plans(file, [plan])
    with contextlib.redirect_stderr(io.StringIO()) as said:  # of kept plans that are ignored
        plans = load_plans(file) if way == "file" else PlanCache(file).load()
    assert said.getvalue().count("\n") == (not plans), said.getvalue()
    if not plans:
        raise StallocError("bad-file: the kept plan is ignored.")
    controller.use(plans[0])


def _change(plan: Plan, rng: np.random.Generator) -> Plan:
    """The plan with a few values changed; often so that as much as possible still agrees with them."""
    columns = {name: getattr(plan, name).copy() for name in _SCHEDULE_COLUMNS}
    header = {name: getattr(plan, name) for name in _HEADER}
    for _ in range(int(rng.integers(1, 4))):
        name = str(rng.choice(_CHANGES, p=_SHARES))
        row, other = rng.integers(len(plan.schedule_size), size=2).tolist()
        if name == "header":
            header[str(rng.choice(_HEADER))] = _value(rng, plan)
        elif name == "moved":  # to where another one is
            columns["schedule_offset"][row] = columns["schedule_offset"][other]
        elif name == "empty":  # an empty lifespan constrains nothing: wherever it is said to lie
            columns["schedule_end"][row] = columns["schedule_start"][row]
            columns["schedule_offset"][row] = _value(rng, plan)
        else:
            columns[name][row] = _value(rng, plan)
    if rng.random() < 0.03:
        header["alignment"] = int(rng.choice([1, 2, 512, 1024]))
    rows = {name.removeprefix("schedule_"): column.copy() for name, column in columns.items()}
    changed = dataclasses.replace(plan, **header, **columns, **rows)
    if rng.random() < 0.8:  # claims that agree with the columns
        changed = dataclasses.replace(changed, lower_bound_bytes=_load(changed), proven_bound_bytes=0)
    return changed


def _value(rng: np.random.Generator, plan: Plan) -> int:
    """A number from the edges of what fits somewhere."""
    peak = plan.peak_bytes
    near = (peak, peak - 512, peak + 512, peak + (64 << 20), 2 * peak, int(rng.choice(plan.schedule_offset)), 4 * MIB)
    value = int(rng.choice(np.array([*_SPECIAL, *near, (1 << 63) - 1])))
    return max(-(1 << 63), min((1 << 63) - 1, value + int(rng.choice([0, 0, 0, -512, 512, 1]))))


def _load(plan: Plan) -> int:
    """The maximum load that a validator will find, where it can be computed at all."""
    counted = (plan.schedule_offset >= 0) & (plan.schedule_start < plan.schedule_end) & (plan.schedule_size > 0)
    small = 1 << 50
    counted &= (
        (plan.schedule_size < small) & (np.abs(plan.schedule_start) < small) & (np.abs(plan.schedule_end) < small)
    )
    if not counted.any() or plan.cycle_end <= plan.cycle_start or max(plan.cycle_end, -plan.cycle_start) > 1 << 50:
        return 0
    rounded = -(-plan.schedule_size[counted] // max(plan.alignment, 1)) * max(plan.alignment, 1)
    times = plan.schedule_start[counted], plan.schedule_end[counted]
    return max(0, cycle_bound(*times, rounded, plan.cycle_start, plan.cycle_end))
