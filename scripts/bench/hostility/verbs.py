"""What is run on each kind of file: verbs of the command line in this process, and the judge of plans by itself."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stalloc.errors import BadInputError

Arguments = Callable[[Path, Path, Path], list[str]]
"""Of a file, of the intact file that goes with it, and of a folder for what is written."""


@dataclass(frozen=True)
class Verb:
    """One way to use a file."""

    name: str
    arguments: Arguments | None  #: None: load the plans and judge them, without the command line
    weight: int = 1


def _plan(file: Path, intact: Path, out: Path) -> list[str]:
    """How long a search goes on is no matter of what the file holds."""
    return ["plan", str(file), "-o", str(out / "p.plan.npz"), "--time-budget", "0.5"]


_ON_TRACES = (
    Verb("stats", lambda file, _, __: ["stats", str(file)], 4),
    Verb("explain", lambda file, _, __: ["explain", str(file)], 3),
    Verb("top", lambda file, _, __: ["top", str(file)], 2),
    Verb("top --tree", lambda file, _, __: ["top", "--tree", str(file)]),
    Verb("timeline", lambda file, _, __: ["timeline", str(file)]),
    Verb("report", lambda file, _, out: ["report", str(file), "-o", str(out / "r.html")], 2),
    Verb("report markdown", lambda file, _, out: ["report", str(file), "-o", str(out / "r.md")]),
    Verb("plan", _plan, 2),
    Verb("simulate", lambda file, _, __: ["simulate", str(file)]),
    Verb("diff", lambda file, intact, _: ["diff", str(intact), str(file)], 2),
    Verb("validate", lambda file, intact, _: ["validate", str(intact.parent / "plan.npz"), str(file)], 2),
    Verb("convert to trace", lambda file, _, out: ["convert", "--force", str(file), str(out / "c.trace.npz")]),
    Verb("convert to snapshot", lambda file, _, out: ["convert", "--force", str(file), str(out / "c.pickle")]),
    Verb("convert to perfetto", lambda file, _, out: ["convert", "--force", str(file), str(out / "c.json")]),
    Verb("convert to csv", lambda file, _, out: ["convert", "--force", str(file), str(out / "c.csv")]),
)
_ON_PLANS = (
    Verb("validate", lambda file, intact, _: ["validate", str(file), str(intact)], 2),
    Verb("judge", None, 3),
    Verb("stats", lambda file, _, __: ["stats", str(file)]),
)
_ON_PLACES = (Verb("plan --fixed", lambda file, intact, _: ["plan", str(intact), "--fixed", str(file)]),)


def verbs_of(kind: str) -> tuple[Verb, ...]:
    """The verbs that take a kind of file."""
    return {"plan": _ON_PLANS, "fixed": _ON_PLACES}.get(kind, _ON_TRACES)


def run(verb: Verb, file: Path, intact: Path, out: Path) -> int:
    """Run a verb as the command line does; its exit code."""
    if verb.arguments is not None:
        from stalloc.cli import main

        return main(verb.arguments(file, intact, out))
    from stalloc.notices import say
    from stalloc.planner import load_plans, validate

    try:
        plans = load_plans(file)
    except BadInputError as error:
        say(str(error))
        return 2
    return 0 if all(validate(one).ok for one in plans) else 1
