"""What is run on each kind of file, and a number of mutations: which seed and verb each takes, and what was found.

Contract: a mutation is a function of the campaign's seed and its number alone as long as the corpus is the same, apart
from which inputs were kept before it; a finding is saved as the file that shows it.
"""

import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from stalloc.errors import BadInputError
from stalloc.planner import plan, save_plans

from .corpus import MUTATORS, Seed, load, parse
from .mutations import packed
from .workers import UNMADE, Outcome, Run, Task, observe, run_all


@dataclass(frozen=True)
class Verb:
    name: str
    typed: str  #: with places for a file, for the intact file that goes with it, and for a folder for what is written
    weight: int = 1


_ON_TRACES = (
    Verb("stats", "stats {file}", 4),
    Verb("explain", "explain {file}", 3),
    Verb("top", "top {file}", 2),
    Verb("top --tree", "top --tree {file}"),
    Verb("timeline", "timeline {file}"),
    Verb("report", "report {file} -o {out}/r.html", 2),
    Verb("report markdown", "report {file} -o {out}/r.md"),
    Verb("plan", "plan {file} -o {out}/p.plan.npz --time-budget 0.5", 2),  # how long a search goes on is no matter
    Verb("simulate", "simulate {file}"),
    Verb("diff", "diff {intact} {file}", 2),
    Verb("validate", "validate {intact.parent}/plan.npz {file}", 2),
    Verb("convert to trace", "convert --force {file} {out}/c.trace.npz"),
    Verb("convert to snapshot", "convert --force {file} {out}/c.pickle"),
    Verb("convert to perfetto", "convert --force {file} {out}/c.json"),
    Verb("convert to csv", "convert --force {file} {out}/c.csv"),
)
#: to judge is to load the plans and validate them, without the command line
_ON_PLANS = (Verb("validate", "validate {file} {intact}", 2), Verb("judge", "", 3), Verb("stats", "stats {file}"))
_ON_PLACES = (Verb("plan --fixed", "plan {intact} --fixed {file}"),)


def verbs_of(kind: str) -> tuple[Verb, ...]:
    return {"plan": _ON_PLANS, "fixed": _ON_PLACES}.get(kind, _ON_TRACES)


def run(verb: Verb, file: Path, intact: Path, out: Path) -> int:
    """Run a verb as the command line does; its exit code."""
    if verb.typed:
        from stalloc.cli import main

        return main([word.format(file=file, intact=intact, out=out) for word in verb.typed.split()])
    from stalloc.notices import say
    from stalloc.planner import load_plans, validate

    try:
        plans = load_plans(file)
    except BadInputError as error:
        say(str(error))
        return 2
    return 0 if all(validate(one).ok for one in plans) else 1


LIMIT_SECONDS, LIMIT_BYTES = 2.0, 1 << 30
"""Above what the intact file takes."""
ROUND = 2000
"""Mutations between two looks at what is new."""
MAX_KEPT = 400
"""Inputs of a kind, read or refused, that made a verb say something new and are mutated further."""


@dataclass
class Cell:
    runs: int = 0
    accepted: int = 0  #: exit code 0
    judged: int = 0  #: exit code 1: read, and found wanting
    refused: int = 0  #: exit code 2
    findings: int = 0
    most_seconds: float = 0.0
    most_bytes: int = 0


@dataclass
class Finding:
    kind: str
    verb: str
    failure: str
    cause: str
    count: int = 0
    files: list[str] = field(default_factory=list)


@dataclass
class _Prepared:
    """A seed on disk, as it is, with what its verbs take."""

    seed: Seed
    intact: Path
    cost: dict[str, Outcome]


@dataclass(frozen=True)
class _Plan:
    base: Seed
    prepared: _Prepared
    verb: Verb
    number: int


class Campaign:
    def __init__(self, seeds: list[Seed], *, seed: int = 1, jobs: int = 1, keep: Path | None = None) -> None:
        self.cells: dict[tuple[str, str], Cell] = defaultdict(Cell)
        self.findings: dict[tuple[str, str, str], Finding] = {}
        self.num_kept = 0
        self.num_runs = 0
        self._seed, self._jobs, self._keep = seed, jobs, keep
        self._folder = tempfile.TemporaryDirectory(prefix="stalloc-hostile-")
        self._known: set[tuple[str, str, str]] = set()
        self._prepared = self._prepare(seeds)
        self._of_kind: dict[str, list[_Prepared]] = defaultdict(list)
        for prepared in self._prepared:
            self._of_kind[prepared.seed.kind].append(prepared)
        self._kept: dict[tuple[str, bool], list[tuple[Seed, _Prepared]]] = defaultdict(list)
        """By kind of file and whether it was read: what is refused already hides what comes after."""
        for seed in seeds:
            parse(seed.kind, seed.data)

    def _prepare(self, seeds: list[Seed]) -> list[_Prepared]:
        """Write the seeds and run each verb on them as they are, here, so that children find everything compiled."""
        _compile_search()
        folders = {}
        made: list[_Prepared] = []
        for number, seed in enumerate(seeds):
            folder = folders[seed.name] = Path(self._folder.name) / str(number)
            folder.mkdir()
            file = folder / f"intact{MUTATORS[seed.kind][0]}"
            file.write_bytes(seed.data)
            if seed.kind not in ("plan", "fixed"):
                try:
                    save_plans(folder / "plan.npz", [plan(trace) for trace in load(seed)])
                except BadInputError:
                    save_plans(folder / "plan.npz", [])
        compiled: set[tuple[str, str]] = set()
        for seed in seeds:
            (file,) = folders[seed.name].glob("intact*")
            (intact,) = folders[seed.partner or seed.name].glob("intact*")
            prepared = _Prepared(seed, intact, {})
            made.append(prepared)
            verbs = verbs_of(seed.kind)
            runs = [partial(run, verb, file, intact, file.parent) for verb in verbs]
            for verb, once in zip(verbs, runs, strict=True):
                if (seed.kind, verb.name) not in compiled:
                    compiled.add((seed.kind, verb.name))
                    observe(once)
            tasks: list[Task] = [lambda once=once: once for once in runs]  # type: ignore[misc]
            for index, outcome in run_all(tasks, 1):
                prepared.cost[verbs[index].name] = outcome
                if outcome.failure:
                    self._find(seed.kind, verbs[index].name, outcome.failure, outcome.cause, seed.data)
                self._known.add((seed.kind, verbs[index].name, outcome.signature))
        return made

    def run(self, mutations: int, seconds: float = float("inf")) -> Iterator[int]:
        end = time.monotonic() + seconds
        while self.num_runs < mutations and time.monotonic() < end:
            count = min(ROUND, mutations - self.num_runs)
            plans = [self._choose(self.num_runs + number) for number in range(count)]
            tasks = [self._task(plan) for plan in plans]
            for index, outcome in run_all(tasks, self._jobs):
                if outcome.failure == "hang" or outcome.seconds > 2:  # on a busy machine, or it compiled something
                    ((_, outcome),) = run_all([tasks[index]], 1)
                self._note(plans[index], outcome)
            self.num_runs += count
            yield self.num_runs

    def _choose(self, number: int) -> _Plan:
        rng = random.Random(f"{self._seed} choose {number}")
        kind = rng.choice([*self._of_kind, "snapshot", "trace", "plan"])
        if kind not in self._of_kind:
            kind = rng.choice(list(self._of_kind))
        pool = self._kept[kind, rng.random() < 0.8]
        if pool and rng.random() < 0.5:
            base, prepared = rng.choice(pool)
        else:
            prepared = rng.choice(self._of_kind[kind])
            base = prepared.seed
        verbs = verbs_of(kind)
        verb = rng.choices(verbs, [verb.weight for verb in verbs])[0]
        return _Plan(base, prepared, verb, number)

    def _mutated(self, plan: _Plan) -> tuple[str, bytes]:
        rng = random.Random(f"{self._seed} mutate {plan.number}")
        suffix, mutate = MUTATORS[plan.base.kind]
        data = plan.base.data
        for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
            data = mutate(rng, data, rng.choice(self._of_kind[plan.base.kind]).seed.data)
        if plan.base.kind not in ("trace", "plan", "fixed") and rng.random() < 0.06:
            return f"m{suffix}.gz", packed(rng, data)
        return f"m{suffix}", data

    def _task(self, plan: _Plan) -> Task:
        def prepare() -> Run:
            folder = Path(tempfile.mkdtemp(dir=self._folder.name))
            name, data = self._mutated(plan)
            (folder / name).write_bytes(data)

            def once() -> int:
                try:
                    return run(plan.verb, folder / name, plan.prepared.intact, folder)
                finally:
                    shutil.rmtree(folder)

            return once

        return prepare

    def _note(self, plan: _Plan, outcome: Outcome) -> None:
        if outcome.cause.endswith(UNMADE):
            return  # there was no file yet: that is nothing about a verb
        kind, verb = plan.base.kind, plan.verb.name
        clean = plan.prepared.cost[verb]
        cell = self.cells[kind, verb]
        cell.runs += 1
        cell.accepted += outcome.code == 0
        cell.judged += outcome.code == 1
        cell.refused += outcome.code == 2
        cell.most_seconds = max(cell.most_seconds, outcome.seconds)
        cell.most_bytes = max(cell.most_bytes, outcome.grown_bytes)
        failure, cause, was_read = outcome.failure, outcome.cause, outcome.code != 2
        if not failure and outcome.seconds > clean.seconds + LIMIT_SECONDS:
            failure, cause = "slow", outcome.signature
        if not failure and outcome.grown_bytes > clean.grown_bytes + LIMIT_BYTES:
            failure, cause = "memory", outcome.signature
        if failure:
            cell.findings += 1
            name, data = self._mutated(plan)
            self._find(kind, verb, failure, cause, data, Path(name).suffix, plan.number)
        elif (kind, verb, outcome.signature) not in self._known and len(self._kept[kind, was_read]) < MAX_KEPT:
            self._known.add((kind, verb, outcome.signature))
            name, data = self._mutated(plan)
            if not name.endswith(".gz") and len(data) < 1 << 18:
                self.num_kept += 1
                parse(kind, data)
                kept = Seed(f"kept {plan.number}", kind, data, plan.base.partner)
                self._kept[kind, was_read].append((kept, plan.prepared))

    def _find(
        self, kind: str, verb: str, failure: str, cause: str, data: bytes, suffix: str = "", number: int = -1
    ) -> None:
        found = self.findings.setdefault((kind, failure, cause), Finding(kind, verb, failure, cause))
        found.count += 1
        if self._keep is not None and len(found.files) < 3:
            ending = MUTATORS[kind][0] + (".gz" if suffix == ".gz" else "")
            file = self._keep / f"{kind}-{verb.replace(' ', '-')}-{failure}-{len(self.findings)}-{number}{ending}"
            self._keep.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            found.files.append(file.name)

    def close(self) -> None:
        self._folder.cleanup()


def _compile_search() -> None:
    """Plan problems that are small, and hard enough that the planner searches; most seeds are planned without."""
    rng = random.Random(0)
    start = [rng.randrange(60) for _ in range(80)]
    end = [first + rng.randrange(1, 30) for first in start]
    lifespans = start, end, [rng.randrange(1, 100) for _ in start]
    alignments = [rng.choice((1, 2, 8)) for _ in start]
    plan(lifespans, alignment=1)
    for fixed in (None, {0: 0, 7: 4_000}):
        for forbidden in ((), [(100, 300)]):
            plan(lifespans, alignment=alignments, fixed=fixed, forbidden=forbidden, time_budget_seconds=20)
