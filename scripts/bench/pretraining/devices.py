"""On which devices a configuration runs under which allocator, and what that is worth: faster ones that fit.

Contract: a step takes what the slower of the measured ranks does, plus the bubble of the pipeline; a configuration runs
on devices of a size if all ranks of the pipeline complete there, each run for itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from harm.running import Setting, run

from pretraining.measuring import CONFIGURATIONS, PIPELINE_RANKS, RANKS, Cell, Row, bubble

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
        """How many more steps in the same time."""
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
    """Of all configurations of a model whose ranks were measured."""
    found = []
    for configuration in CONFIGURATIONS:
        of_ranks = [rows.get(Cell(model, configuration, rank)) for rank in RANKS]
        ranks = [row for row in of_ranks if row is not None]
        if len(ranks) == len(RANKS):
            found.append(
                Need(
                    model=model,
                    configuration=configuration,
                    seconds=max(
                        row.recorded.pipeline_seconds * (1 + bubble(configuration)) + row.recorded.update_seconds
                        for row in ranks
                    ),
                    native_bytes=max(row.recorded.native_least_bytes for row in ranks),
                    expandable_bytes=max(row.recorded.expandable_least_bytes for row in ranks),
                    stalloc_bytes=max(row.stalloc_bytes for row in ranks),
                )
            )
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
