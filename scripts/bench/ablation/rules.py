"""The rules of the runtime that can be switched off, and where they say that they decided something: `rules.toml`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from changed import Change


@dataclass(frozen=True)
class Rule:
    """One rule, or several that are tried together."""

    name: str
    lines: int  #: of the package that go with it, about
    what: str
    changes: tuple[Change, ...]

    def __add__(self, other: "Rule") -> "Rule":
        name, what = f"{self.name} + {other.name}", "several rules"
        return Rule(name, self.lines + other.lines, what, self.changes + other.changes)


def _before(statement: str, *lines: str) -> str:
    indent = statement[: len(statement) - len(statement.lstrip())]
    return "".join(f"{indent}{line}\n" for line in lines) + statement


def _change(name: str, told: dict[str, str]) -> Change:
    if "returns" in told:
        told = told | {"new": _before(told["old"], "if True:", f"    return {told['returns']}")}
    return Change(name=name, file=told["file"], old=told["old"], new=told["new"])


def _probe(name: str, told: dict[str, str]) -> Change:
    """What calls `fired`, which trials.py puts into builtins, where a rule's answer is not the neutral one."""
    if "before" in told:
        told = told | {"old": told["before"], "new": _before(told["before"], "FIRED")}
    return Change(name=name, file=told["file"], old=told["old"], new=told["new"].replace("FIRED", f'fired("{name}")'))


_TOLD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RULES = tuple(
    Rule(name, told["lines"], told["what"], tuple(_change(name, one) for one in told["changes"]))
    for name, told in _TOLD.items()
)
BY_NAME = {rule.name: rule for rule in RULES}
#: all are in one copy at a time
PROBES = tuple(_probe(name, one) for name, told in _TOLD.items() for one in told.get("probes", ()))
PROBED = {probe.name for probe in PROBES}
