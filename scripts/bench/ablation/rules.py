"""The rules of the runtime that can be switched off, by `rules.toml`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from changed import Change


@dataclass(frozen=True)
class Rule:
    """One rule, or several that are tried together."""

    name: str
    lines: int  #: of the package that go with it, about
    what: str
    changes: tuple[Change, ...]

    def __add__(self, other: "Rule") -> "Rule":
        """Both off."""
        name, what = f"{self.name} + {other.name}", "several rules"
        return Rule(name, self.lines + other.lines, what, self.changes + other.changes)


def _change(name: str, told: dict[str, str]) -> Change:
    old = told["old"]
    if "new" in told:
        return Change(name=name, **told)
    indent = old[: len(old) - len(old.lstrip())]
    returned = f"{indent}if True:\n{indent}    return {told['returns']}\n{old}"
    return Change(name=name, file=told["file"], old=old, new=returned)


def _rule(name: str, *, changes: list[dict[str, str]], **told: Any) -> Rule:
    return Rule(name, changes=tuple(_change(name, one) for one in changes), **told)


_FILE = Path(__file__).with_suffix(".toml")
BY_NAME = {name: _rule(name, **told) for name, told in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()}
RULES = tuple(BY_NAME.values())
