"""Finding the cheapest way to run a program within a budget: propose by what a run shows, verify by execution.

Contract: a candidate is said to fit only if it was run within the budget, on its plan, from its first allocation on.
Each technique makes its proposals in a file of its own; they are run here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from stalloc.errors import BadInputError, SetupError
from stalloc.figures import human_bytes, plural
from stalloc.fitting.fit_record import Candidate, cheapest
from stalloc.fitting.frontier import proposal, whole_blocks
from stalloc.fitting.imports_ahead import import_ahead
from stalloc.fitting.observation import MEMORY_STEP, ProgramSeen
from stalloc.fitting.policy_search import check_policy, propose
from stalloc.fitting.proposals import Base, Foresee, Known, Proposals, Way
from stalloc.fitting.run_seen import Foresight, RunSeen
from stalloc.fitting.tier_search import with_host
from stalloc.fitting.trials import STEPS, Measured, TrialWork
from stalloc.techniques.technique_settings import TechniqueSettings

_RUNS_SHORT = "memory runs short within the budget, though its plan needs no more"
_VARIES = "the program's steps differ between two trials, so a longer run may need more than was measured"
_MOST_UNLIKE = 0.05
_UNLIKE = (
    "much of what the program allocates was not found again, in its place, in a run with blocks recomputed (its "
    "runs differ, or backward makes what it makes in another order): which choices are tried is less certain, and what "
    "each needs is measured as ever"
)
_LOOK_STEPS, _LOOK_REQUESTS = 256, 100_000  # limits of looking ahead: 2 to 10 s of processor time
_LATER = "a later one that is larger, or unlike them, can run out of memory within the budget"
_LOOK_PROCESSOR_SECONDS = 20.0  # limit of looking ahead for programs that compute or read much on the processor
_MOST_STEPS, _MOST_REQUESTS = 64, 50_000  # of one trial; a fit makes about eight trials

_Kind = tuple[int, int]
"""Requests of a step, and bytes that were asked for at its peak."""


@dataclass
class Fitting:
    """Candidates that were run, with settings and plans; `trial` runs one, `tell` says what is being done."""

    known: Known
    trial: Callable[[TrialWork], Measured]
    tell: Callable[[str], None]
    num_steps: int = 0  #: steps of a trial; 0: as many as are worth it
    num_within: int = 0  #: steps of a run within the budget, at least
    num_trials: int = 0
    settings: list[TechniqueSettings] = field(default_factory=list)  #: of each candidate
    plans: list[bytes] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    asked: str = ""  #: a digest of what the first steps of the program as it is ask for
    as_it_is: Base = field(default_factory=Base)
    _recorded: dict[TechniqueSettings, Measured] = field(default_factory=dict)  # runs that a plan was made from

    def run(self, policy: str | None = None) -> int:
        """Fill the candidates; the row of the best, -1 if none fits. Raises SetupError if the program cannot be tried.
        `policy`: the name of the only technique to try. Raises BadInputError if there is none of that name."""
        check_policy(policy)
        self._observe()
        if self.num_steps:
            if not self.try_once(TrialWork("native", num_steps=self.num_steps + 1)).is_whole:
                self.note([f"each run has {self.num_steps} steps, and {_LATER}"])
        else:
            self.tell("looking at later steps of the program")
            ahead = _look_ahead(self.try_once, STEPS)
            self.num_steps, self.num_within = ahead.num_steps, ahead.num_within
            self.note([ahead.note])
        foreseen = self._foresee(self.as_it_is.settings)
        base = Base(foresight=None if isinstance(foreseen, str) else foreseen)
        first = self.measure(Way(base, proposal(self.known.step, {}), "as it is", "none"))
        self.as_it_is = dataclasses.replace(base, alone=first)
        self.pursue(propose(self.known, self.as_it_is, policy))
        return cheapest(self.known.candidates, self.known.budget_bytes)

    def pursue(self, proposals: Proposals) -> None:
        answer: object = None
        while True:
            try:
                wanted = proposals.send(answer)
            except StopIteration:
                return
            answer = None
            match wanted:
                case Way():
                    answer = self.measure(wanted)
                case Foresee():
                    answer = self._foresee(wanted.settings)
                case TrialWork():
                    answer = self._watch(wanted) if wanted.under == "recorded" else self.try_once(wanted)
                case str():
                    self.note([wanted])

    def _observe(self) -> None:
        self.tell("looking at a step of the program")
        if (measured := self.try_once(TrialWork("observed"))).failure:
            raise SetupError(f"{measured.failure}: nothing can be fitted to a program that does not run.")
        import_ahead(measured.imports)
        self.known.step = step = ProgramSeen.from_json(measured.seen)
        if not measured.steps and step.num_steps <= MEMORY_STEP:
            raise BadInputError(
                "the program used no GPU through PyTorch: a budget is kept for what PyTorch trains (what CuPy "
                "allocates is planned by stalloc run, without a budget)."
            )
        if not step.num_steps:
            raise BadInputError(
                "no optimizer of PyTorch made a step in the program, which is how its steps are told: nothing was "
                "fitted."
            )
        if step.num_steps <= MEMORY_STEP:
            raise BadInputError(
                f"the program ended after {plural(step.num_steps, 'step')}, and three are looked at: give it arguments "
                "with which it trains longer."
            )

    def _foresee(self, settings: TechniqueSettings) -> Foresight | str:
        """Run the program as it is and with all blocks recomputed, so that other choices can be foreseen. A text says
        why that cannot be done."""
        as_is = self._watch(self.known.recorded(settings))
        if as_is.failure:
            return as_is.failure
        self.asked = self.asked or as_is.asked
        base = Base(settings)
        while True:
            step = self.known.step
            every = base.with_blocks(step, proposal(step, whole_blocks(step)))
            again = self._watch(self.known.recorded(every)) if every.recompute.blocks else as_is
            if not again.failure:
                break
            if _is_of_base(again, base):
                return again.failure
            self._leave_out(again)
        self.note(again.notes)
        foresight = Foresight(RunSeen.from_json(again.seen), RunSeen.from_json(as_is.seen))
        if foresight.unlike > _MOST_UNLIKE:
            self.note([_UNLIKE])
        counts: dict[int, set[int]] = {}
        for call in foresight.calls:
            counts.setdefault(call.block, set()).add(len(call.forward))
        self.known.step = self.known.step.with_casts_once(counts)
        return foresight

    def _watch(self, work: TrialWork) -> Measured:
        """Run the program under stalloc, and note which request is made for what."""
        self.tell(f"running the program with {plural(len(work.settings.recompute.blocks), 'block')} recomputed")
        self._recorded[work.settings] = measured = self.try_once(work)
        return measured

    def measure(self, way: Way) -> Candidate:
        """Run one way under stalloc, and on the plan that this gives; a row of the table."""
        base, proposed, step, what = way.base, way.proposed, self.known.step, way.what
        settings = base.with_blocks(step, proposed)
        if settings in self.settings:
            return self.known.candidates[self.settings.index(settings)]
        if base.also and proposed.choices:
            what += f", {base.also}"
        self.tell(f"running the program: {what}")
        candidate = Candidate(
            what=what,
            technique=way.technique,
            expected_bytes=base.expected_bytes(step, proposed),
            added_seconds=proposed.seconds,
            factor=1 + proposed.seconds / step.step_seconds if step.step_seconds else 1.0,
        )
        plan = b""
        recorded = self._recorded.pop(settings, None) or self.try_once(TrialWork("recorded", settings))
        if recorded.failure:
            if not _is_of_base(recorded, base):
                self._leave_out(recorded)
            candidate = dataclasses.replace(candidate, refused=recorded.failure)
        else:
            candidate = with_host(self.known, base, candidate, recorded)
            if not candidate.refused:
                candidate, plan = self._on_its_plan(candidate, settings, recorded)
        self.note(recorded.notes)
        self.known.candidates.append(candidate)
        self.settings.append(settings)
        self.plans.append(plan)
        return candidate

    def _on_its_plan(
        self, candidate: Candidate, settings: TechniqueSettings, recorded: Measured
    ) -> tuple[Candidate, bytes]:
        work, budget_bytes = TrialWork("planned", settings, plan=recorded.plan), self.known.budget_bytes
        within = self._within(work) if 0 < candidate.expected_bytes <= budget_bytes else None
        planned = within
        if within is None or _why_not_kept(within):
            planned = self.try_once(work)
            if planned.failure:
                return dataclasses.replace(candidate, refused=planned.failure), b""
            if within is None and planned.allocated_bytes <= budget_bytes:
                within = self._within(work)
        assert planned is not None
        refused = ""
        if within is not None:
            if not (reason := _why_not_kept(within)):
                planned = within
            elif planned.reserved_bytes <= budget_bytes and (within.failure or not planned.num_shortages):
                refused = reason  # else no plan of it is kept, whatever there is
        if any(one[0] != other[0] for one, other in zip(recorded.steps, planned.steps, strict=False)):
            self.note([_VARIES])
        how = f"run, {plural(len(planned.steps), 'step')}" + ("" if recorded.plan else ", no plan")
        return dataclasses.replace(
            candidate,
            allocated_bytes=planned.allocated_bytes,
            needed_bytes=planned.reserved_bytes,
            checked=how,
            refused=refused,
        ), recorded.plan

    def _within(self, work: TrialWork) -> Measured:
        """Run a plan with no more memory than it will have, which decides whether it fits. What the program does at its
        end may fail in a trial for reasons of its own: that is left out then."""
        self.tell("the same with no more memory than the budget")
        work = dataclasses.replace(work, limit_bytes=self.known.budget_bytes)
        within = self.try_once(dataclasses.replace(work, num_steps=max(self.num_within, _steps_within(self.num_steps))))
        return self.try_once(work) if within.failure and not within.out_of_memory else within

    def try_once(self, work: TrialWork) -> Measured:
        self.num_trials += 1
        return self.trial(dataclasses.replace(work, num_steps=max(work.num_steps, self.num_steps)))

    def note(self, notes: list[str]) -> None:
        self.notes += [note for note in notes if note not in self.notes]

    def _leave_out(self, measured: Measured) -> None:
        """Blocks of the kind that could not be computed twice stay as they are; all of them if that is not known."""
        kinds = {block.name: block.kind for block in self.known.step.blocks}
        kind = kinds.get(measured.refused_block.removesuffix(":"))
        self.note([measured.failure])
        self.known.step = self.known.step.without(kind, measured.failure)


def _is_of_base(failed: Measured, base: Base) -> bool:
    """Whether a failure names no block although techniques other than recomputation are in use."""
    return not failed.refused_block and base.settings != TechniqueSettings()


def _why_not_kept(within: Measured) -> str:
    """Why a run within the budget does not count: without its plan, or with another algorithm where memory was short, a
    later step may need more. Empty if it does."""
    return _RUNS_SHORT if within.out_of_memory or within.num_shortages else within.failure


@dataclass(frozen=True)
class Ahead:
    """How many steps a trial needs, how many a run within the budget needs, and a note about later steps."""

    num_steps: int
    num_within: int
    note: str


def _look_ahead(trial: Callable[[TrialWork], Measured], least: int) -> Ahead:
    """Run the program as it is for many steps, so that those which need other memory are tried too. It runs once,
    unchanged, under PyTorch's allocator, up to a number of steps or requests, so what is seen does not depend on other
    work of the machine. Steps are of one kind if they make as many requests and have the same peak of requested bytes
    (what PyTorch's allocator hands out depends on which blocks are free); requests after the last step count as a step
    too. Trials have as many steps as it takes to see every kind once after every kind that it follows, as long as these
    are few: a step finds the memory that the one before left. The run within the budget, which decides, has all steps
    that were seen to differ. What is left out is said."""
    work = TrialWork("native", num_steps=_LOOK_STEPS, most_requests=_LOOK_REQUESTS)
    seen = trial(dataclasses.replace(work, most_processor_seconds=_LOOK_PROCESSOR_SECONDS))
    if seen.failure:
        return Ahead(least, _steps_within(least), f"each run has {least} steps, and {_LATER}")
    until = [0, *(count for count, _ in seen.requests)]
    kinds = [(now - before, peak) for (before, now), (_, peak) in zip(pairwise(until), seen.requests, strict=True)]
    return steps_to_try(kinds, least, is_whole=seen.is_whole, has_rest=seen.has_rest)


def _steps_within(num_steps: int) -> int:
    """How many steps a run within the budget has: what is short of memory may fail later than a plan repeats."""
    return 2 * num_steps + 3


def steps_to_try(kinds: Sequence[_Kind], least: int, *, is_whole: bool, has_rest: bool = False) -> Ahead:
    """How many steps a trial and a run within the budget are to have, given those that were seen; `least` or more.
    `is_whole`: the program has no more. `has_rest`: the last one is what came after the last step."""
    first: dict[tuple[_Kind, _Kind], int] = {}
    for number, pair in enumerate(pairwise(kinds), start=1):
        first.setdefault(pair, number)
    new = [number for (_, (requests, _)), number in first.items() if number >= least and requests]
    short = sum(made <= _MOST_REQUESTS for made in accumulate(requests for requests, _ in kinds))
    most = max(least, min(_MOST_STEPS, short))
    num_steps = max([least, *(min(number + 2, len(kinds)) for number in new if number < most)])
    num_within = max([_steps_within(num_steps), *(number + 2 for number in new)])
    num_seen = len(kinds) - has_rest
    looked = f"{'all' if is_whole else 'the first'} {num_seen} steps{' and what follows' * has_rest} were looked at"
    later = "" if is_whole else f"; {_LATER}"
    left = [number for number in new if number >= num_steps]
    if not left:
        unlike = f"; {len(new)} of them unlike the first {least}, or after others, so each run has {num_steps}"
        return Ahead(num_steps, num_within, f"{looked}{unlike * bool(new)}{later}")
    largest = max(left, key=lambda number: kinds[number][1])
    which = f"step {largest + 1}, which" if largest < num_seen else "what follows them, which"
    told = (
        f"{looked}, and {which} allocates {human_bytes(kinds[largest][1])}, is unlike those that were tried, or after "
        f"another: only the run within the budget has it; --trial-steps {max(left) + 1} has all runs try it{later}"
    )
    return Ahead(num_steps, num_within, told)
