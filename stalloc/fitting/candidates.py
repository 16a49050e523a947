"""Finding the cheapest way to run a program within a budget: propose by what a run shows, verify by execution.

Contract: no candidate is said to fit that was not run within the budget, on its plan, from its first allocation. What
is proposed, each technique says in a file of its own; here it is run.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from stalloc.errors import BadInputError, SetupError
from stalloc.figures import plural
from stalloc.fitting.activation_search import Expected, try_activations
from stalloc.fitting.compiled_search import try_compiled
from stalloc.fitting.fit_record import Candidate, cheapest
from stalloc.fitting.frontier import Proposal, proposal, settings_of, whole_blocks
from stalloc.fitting.imports_ahead import import_ahead
from stalloc.fitting.look_ahead import LATER, look_ahead, steps_within
from stalloc.fitting.observation import MEMORY_STEP, ProgramSeen
from stalloc.fitting.policy_search import check_policy, try_named
from stalloc.fitting.presets import try_attention, try_selective, try_whole
from stalloc.fitting.recompute_search import try_cheapest
from stalloc.fitting.run_seen import Foresight, RunSeen
from stalloc.fitting.step_search import try_step_in_backward
from stalloc.fitting.tier_search import is_of_tiers, try_tiers, with_host
from stalloc.fitting.trial_work import TrialWork
from stalloc.fitting.trials import STEPS, Measured
from stalloc.techniques.technique_settings import TechniqueSettings

_RUNS_SHORT = "memory runs short within the budget, though its plan needs no more"
_VARIES = "the program's steps differ between two trials, so a longer run may need more than was measured"
_MOST_UNLIKE = 0.05
_UNLIKE = (
    "much of what the program allocates was not found again, in its place, in a run with blocks recomputed (its "
    "runs differ, or backward makes what it makes in another order): which choices are tried is less certain, and what "
    "each needs is measured as ever"
)
Trial = Callable[[TrialWork], Measured]
Tell = Callable[[str], None]


@dataclass
class Fitting:
    """Candidates that were run, with settings and plans; `trial` runs one, `tell` says what is being done."""

    budget_bytes: int
    trial: Trial
    tell: Tell
    host_bytes: int = 0  #: of host memory that tiers may use
    disk_bytes: int = 0  #: the same on disk
    link_bytes_per_second: float = 32e9  #: between host and device
    step: ProgramSeen = field(init=False)
    candidates: list[Candidate] = field(default_factory=list)
    settings: list[TechniqueSettings] = field(default_factory=list)
    plans: list[bytes] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_steps: int = 0  #: of a trial; 0: as many as are worth it
    num_within: int = 0  #: the same within the budget, at the least
    num_trials: int = 0
    base: TechniqueSettings = field(
        default_factory=TechniqueSettings
    )  #: of every proposal from here on, beside what it recomputes
    beside: int = 0  #: the candidate of the base alone
    foresight: Foresight | None = None  #: of the base
    offload: Expected | None = None  #: of the base, where it keeps activations in the host
    asked: str = ""  #: a digest of what the first steps of the program as it is ask for
    _recorded: dict[TechniqueSettings, Measured] = field(default_factory=dict)  # runs that a plan was made from

    def run(self, policy: str | None = None) -> int:
        """Fill the candidates; the row of the best, -1 if none fits. Raises SetupError if the program cannot be tried.

        `policy`: the name of the only technique to try. Raises BadInputError if there is none of that name.
        """
        check_policy(policy)
        self._observe()
        self._look_ahead()
        self.foresee()
        plain = self.foresight
        self.measure(proposal(self.step, {}), "as it is", "none")
        fits = self.candidates[0].fits(self.budget_bytes)
        if policy == "step-in-backward" or (policy is None and not fits):
            try_step_in_backward(self, is_named=policy is not None)
        if self.step.is_compiled and (policy == "compile-budget" or (policy is None and not fits)):
            try_compiled(self)
        if not whole_blocks(self.step):
            self.note([self.step.why_no_blocks])
        elif policy is not None:
            try_named(self, policy)
        elif fits:
            try_whole(self)
        else:
            self.note(self.step.why_some_stay)
            try_cheapest(self)
            try_attention(self)
            try_selective(self)
            try_whole(self)
        if is_of_tiers(policy) or (policy is None and self.host_bytes and not fits):
            try_tiers(self, plain, policy)
        if (policy or "").startswith("offload-ratio") or (policy is None and self.host_bytes and not fits):
            try_activations(self, policy)
        return cheapest(self.candidates, self.budget_bytes)

    def _observe(self) -> None:
        self.tell("looking at a step of the program")
        if (measured := self.try_once(TrialWork("observed"))).failure:
            raise SetupError(f"{measured.failure}: nothing can be fitted to a program that does not run.")
        import_ahead(measured.imports)
        self.step = ProgramSeen.from_json(measured.seen)
        if self.step.num_steps <= MEMORY_STEP:
            raise BadInputError(_why_too_short(self.step.num_steps, uses_gpu=bool(measured.steps)))

    def _look_ahead(self) -> None:
        if self.num_steps:
            if not self.try_once(TrialWork("native", num_steps=self.num_steps + 1)).is_whole:
                self.note([f"each run has {self.num_steps} steps, and {LATER}"])
            return
        self.tell("looking at later steps of the program")
        ahead = look_ahead(self.try_once, STEPS)
        self.num_steps, self.num_within = ahead.num_steps, ahead.num_within
        self.note([ahead.note])

    def foresee(self) -> str:
        """Run the program as it is and with all blocks recomputed, from which other choices are foreseen.

        Why that cannot be done comes back; empty if it can.
        """
        as_is = self.watch(self.base)
        if as_is.failure:
            return as_is.failure
        self.asked = self.asked or as_is.asked
        while True:
            settings = self.settings_with(proposal(self.step, whole_blocks(self.step)))
            again = self.watch(settings) if settings.recompute.blocks else as_is
            if not again.failure:
                break
            if self._is_of_base(again):
                return again.failure
            self._leave_out(again)
        self.note(again.notes)
        self.foresight = Foresight(RunSeen.from_json(again.seen), RunSeen.from_json(as_is.seen))
        if self.foresight.unlike > _MOST_UNLIKE:
            self.note([_UNLIKE])
        counts: dict[int, set[int]] = {}
        for call in self.foresight.calls:
            counts.setdefault(call.block, set()).add(len(call.forward))
        self.step = self.step.with_casts_once(counts)
        return ""

    def settings_with(self, proposed: Proposal) -> TechniqueSettings:
        """The base with what is proposed beside it."""
        return dataclasses.replace(self.base, recompute=settings_of(self.step, proposed.choices))

    def watch(self, settings: TechniqueSettings) -> Measured:
        """Run the program under stalloc, and note which request is made for what."""
        self.tell(f"running the program with {plural(len(settings.recompute.blocks), 'block')} recomputed")
        rows = {(block.model, block.name): row for row, block in enumerate(self.step.blocks)}
        self._recorded[settings] = self.try_once(TrialWork("recorded", settings, watched=rows))
        return self._recorded[settings]

    def expected(self, proposed: Proposal) -> int:
        """The most that would be allocated, 0 if that is not known.

        What the program as it is needed more than was foreseen, as when its runs differ, any way may need that leaves
        blocks as they are.
        """
        if self.offload is not None:
            return self.offload.peak_bytes
        if self.foresight is None:
            return 0
        if self.base.tiers:
            return self.foresight.peak_bytes_with(proposed.kept, self.base.tiers)
        blocks = len(whole_blocks(self.step))
        beside = self.candidates[self.beside : self.beside + 1]
        off = [one.allocated_bytes - one.expected_bytes for one in beside if one.allocated_bytes]
        return self.foresight.peak_bytes(proposed.kept) + max([0, *off]) * (0 < len(proposed.choices) < blocks)

    def measure(self, proposed: Proposal, what: str, technique: str) -> Candidate:
        """Run a proposal under stalloc, and on the plan that this gives; a row of the table."""
        settings = self.settings_with(proposed)
        if settings in self.settings:
            return self.candidates[self.settings.index(settings)]
        if settings.step_in_backward and proposed.choices:
            what += ", step in backward"
        self.tell(f"running the program: {what}")
        candidate = Candidate(
            what=what,
            technique=technique,
            expected_bytes=self.expected(proposed),
            added_seconds=proposed.seconds,
            factor=1 + proposed.seconds / self.step.step_seconds if self.step.step_seconds else 1.0,
        )
        plan = b""
        recorded = self._recorded.pop(settings, None) or self.try_once(TrialWork("recorded", settings))
        if recorded.failure:
            if not self._is_of_base(recorded):
                self._leave_out(recorded)
            candidate = dataclasses.replace(candidate, refused=recorded.failure)
        else:
            candidate = with_host(self, candidate, recorded)
            if not candidate.refused:
                candidate, plan = self._on_its_plan(candidate, settings, recorded)
        self.note(recorded.notes)
        self.candidates.append(candidate)
        self.settings.append(settings)
        self.plans.append(plan)
        return candidate

    def _on_its_plan(
        self, candidate: Candidate, settings: TechniqueSettings, recorded: Measured
    ) -> tuple[Candidate, bytes]:
        work = TrialWork("planned", settings, plan=recorded.plan)
        within = self._within(work) if 0 < candidate.expected_bytes <= self.budget_bytes else None
        planned = within
        if within is None or _why_not_kept(within):
            planned = self.try_once(work)
            if planned.failure:
                return dataclasses.replace(candidate, refused=planned.failure), b""
            if within is None and planned.allocated_bytes <= self.budget_bytes:
                within = self._within(work)
        assert planned is not None
        refused = ""
        if within is not None:
            if not (reason := _why_not_kept(within)):
                planned = within
            elif planned.reserved_bytes <= self.budget_bytes and (within.failure or not planned.num_shortages):
                refused = reason  # else no plan of it is kept, whatever there is
        self._check_repeats(recorded, planned)
        how = f"run, {plural(len(planned.steps), 'step')}" + ("" if recorded.plan else ", no plan")
        return dataclasses.replace(
            candidate,
            allocated_bytes=planned.allocated_bytes,
            needed_bytes=planned.reserved_bytes,
            checked=how,
            refused=refused,
        ), recorded.plan

    def _within(self, work: TrialWork) -> Measured:
        """Run a plan with no more memory than it will have: what decides whether it fits.

        What the program does at its end may fail in a trial for reasons of its own: that is left out then.
        """
        self.tell("the same with no more memory than the budget")
        work = dataclasses.replace(work, limit_bytes=self.budget_bytes)
        num_steps = max(self.num_within, steps_within(self.num_steps))
        within = self.try_once(dataclasses.replace(work, num_steps=num_steps))
        return self.try_once(work) if within.failure and not within.out_of_memory else within

    def try_once(self, work: TrialWork) -> Measured:
        """Run the program once."""
        self.num_trials += 1
        return self.trial(dataclasses.replace(work, num_steps=max(work.num_steps, self.num_steps)))

    def _check_repeats(self, one: Measured, other: Measured) -> None:
        """Say where two trials of the same way to run the program needed different bytes in a step that both ran."""
        both = zip(one.steps, other.steps, strict=False)
        self.note([] if all(first[0] == second[0] for first, second in both) else [_VARIES])

    def note(self, notes: list[str]) -> None:
        """Say what has not been said yet."""
        self.notes += [note for note in notes if note not in self.notes]

    def _is_of_base(self, failed: Measured) -> bool:
        """Whether a failure names no block, where more is done than to compute blocks again."""
        return not failed.refused_block and self.base != TechniqueSettings()

    def _leave_out(self, measured: Measured) -> None:
        """Blocks of the kind that could not be computed twice stay as they are; all of them if that is not known."""
        kinds = {block.name: block.kind for block in self.step.blocks}
        kind = kinds.get(measured.refused_block.removesuffix(":"))
        self.note([measured.failure])
        self.step = self.step.without(kind, measured.failure)


def _why_not_kept(within: Measured) -> str:
    """Why a run within the budget does not count: without its plan, or with another algorithm where memory was short, a
    later step may need more. Empty if it does."""
    if within.out_of_memory or within.num_shortages:
        return _RUNS_SHORT
    return within.failure


def _why_too_short(num_steps: int, *, uses_gpu: bool) -> str:
    """Why a program that has ended cannot be fitted."""
    if not uses_gpu:
        return (
            "the program used no GPU through PyTorch: a budget is kept for what PyTorch trains (what CuPy allocates is "
            "planned by stalloc run, without a budget)."
        )
    if not num_steps:
        return (
            "no optimizer of PyTorch made a step in the program, which is how its steps are told: nothing was fitted."
        )
    done = plural(num_steps, "step")
    return f"the program ended after {done}, and three are looked at: give it arguments with which it trains longer."
