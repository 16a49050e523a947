"""Fits that were made before: of which program they are, and whether what they hold can be used.

Contract: a fit of another source, other arguments or another GPU is used only where the program asks for the same
memory, or the user says so; a plan only after the validator has judged it.
"""

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from stalloc.errors import BadInputError
from stalloc.fitting.fit_record import Fit, Program, load_fit
from stalloc.fitting.trial_work import COMPARED_STEPS, TrialWork
from stalloc.fitting.trials import Measured
from stalloc.integrations.program_source import ProgramSource
from stalloc.notices import say
from stalloc.version import full_version

if TYPE_CHECKING:
    from stalloc.planner import Plan


def program_of(source: ProgramSource, gpu: str) -> Program:
    """What identifies this program, on a GPU of this name, to a fit."""
    return Program(
        name=source.path.name if source.path.stem != "__main__" else source.name,
        content=sha256(source.content).hexdigest(),
        arguments=tuple(source.arguments),
        torch=_version("torch"),
        stalloc=full_version(),
        gpu=gpu,
    )


def _version(package: str) -> str:
    """As installed, whether it is imported or not."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def known_fit(file: Path, trial: Callable[[TrialWork], Measured], program: Program) -> Fit | None:
    """The fit in a file, made this program's own, if the program's first steps ask for the same memory; says so."""
    fit = load_fit(file)
    asked = trial(TrialWork("recorded", num_steps=COMPARED_STEPS)).asked
    difference = program.difference(fit.program)
    if asked == fit.asked:
        say(f"{file} is used: {difference}, but the first steps of this one ask for the same memory.")
        gpu = program.gpu if fit.program.gpu else ""
        return dataclasses.replace(fit, program=dataclasses.replace(program, gpu=gpu))
    say(f"{file} is not used: {difference}, and the first steps of this one ask for other memory. It is fitted anew.")
    return None


def plans_of(fit: Fit, file: str | Path) -> "list[Plan] | None":
    """The plan of a fit that came from `file`, judged by the validator; None if its steps do not repeat.

    Raises BadInputError if it is no plan that can be used.
    """
    from stalloc.planner import plans_from_bytes, validate

    if not fit.plan:
        return None
    try:
        plans = plans_from_bytes(fit.plan, file)
        verdicts = [validate(plan, handovers=len(plan.handover_later) > 0) for plan in plans]
    except BadInputError as error:
        raise BadInputError(f"{file}: its plan is damaged: fit the program anew.") from error
    refused = [verdict for verdict in verdicts if not verdict.ok]
    if refused:
        raise BadInputError(f"{file}: its plan is not valid ({refused[0].reason}): fit the program anew.")
    return plans
