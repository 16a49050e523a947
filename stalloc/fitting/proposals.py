"""Ways to run a program, as techniques propose them, and what is known of the program meanwhile.

Contract: a technique is a generator. It yields what it wants to have run, is sent what came of it, and returns the base
to go on from, or None for the one that it was given. It reads what is known, and writes into nothing: `Fitting` runs,
judges and keeps.
"""

import dataclasses
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from stalloc.fitting.fit_record import Candidate
from stalloc.fitting.frontier import Proposal, settings_of, whole_blocks
from stalloc.fitting.observation import ProgramSeen
from stalloc.fitting.run_seen import Foresight
from stalloc.fitting.trials import TrialWork
from stalloc.techniques.technique_settings import TechniqueSettings


@dataclass
class Known:
    """The limits that a fit has to keep, and what is known of the program so far; only `Fitting` adds to it."""

    budget_bytes: int
    host_bytes: int = 0  #: of host memory that tiers may use
    disk_bytes: int = 0  #: on disk that tiers may use
    link_bytes_per_second: float = 32e9  #: between host and device
    step: ProgramSeen = field(default_factory=lambda: ProgramSeen([], [], 0.0, 0))
    candidates: list[Candidate] = field(default_factory=list)  #: one for each way that was run

    def recorded(self, settings: TechniqueSettings) -> TrialWork:
        """A run under stalloc that notes what each request is made for."""
        rows = {(block.model, block.name): row for row, block in enumerate(self.step.blocks)}
        return TrialWork("recorded", settings, watched=rows)

    def fits(self, candidate: Candidate) -> bool:
        return candidate.fits(self.budget_bytes)


@dataclass(frozen=True)
class Offloaded:
    """What is foreseen of a way that keeps activations in the host."""

    peak_bytes: int
    host_bytes: int  #: of activations
    seconds: float  #: that copies of activations add to a step


@dataclass(frozen=True)
class Base:
    """What is done to the program beside recomputing blocks, and what is foreseen of it."""

    settings: TechniqueSettings = field(default_factory=TechniqueSettings)
    foresight: Foresight | None = None  #: None: nothing is
    alone: Candidate | None = None  #: the row of the base with nothing recomputed
    offload: Offloaded | None = None
    also: str = ""  #: for people: what is done beside recomputing, where a row of the table does not say it itself

    def with_blocks(self, step: ProgramSeen, proposed: Proposal) -> TechniqueSettings:
        return dataclasses.replace(self.settings, recompute=settings_of(step, proposed.choices))

    def expected_bytes(self, step: ProgramSeen, proposed: Proposal) -> int:
        """The most that would be allocated, 0 if that is not known. What the base alone needed more than was foreseen,
        as when its runs differ, any way may need that leaves blocks as they are."""
        if self.offload is not None:
            return self.offload.peak_bytes
        if self.foresight is None:
            return 0
        if self.settings.tiers:
            return self.foresight.peak_bytes_with(proposed.kept, self.settings.tiers)
        off, leaves_some = 0, 0 < len(proposed.choices) < len(whole_blocks(step))
        if leaves_some and self.alone is not None and self.alone.allocated_bytes:
            off = max(0, self.alone.allocated_bytes - self.alone.expected_bytes)
        return self.foresight.peak_bytes(proposed.kept) + off


@dataclass(frozen=True)
class Way:
    """One way to run the program: run under stalloc, and on the plan that this gives; a Candidate comes back."""

    base: Base
    proposed: Proposal
    what: str  #: for people
    technique: str  #: the name that `stalloc policies` lists


@dataclass(frozen=True)
class Foresee:
    """Run the program with these settings, as it is and with all blocks recomputed. A Foresight of other choices comes
    back, or a text: why there is none."""

    settings: TechniqueSettings


Wanted = Way | Foresee | TrialWork | str
"""What a technique may yield: a TrialWork is run once and a Measured comes back; a text is a note for people."""
Proposals = Generator[Wanted, Any, Base | None]
