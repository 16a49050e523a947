"""`[tool.stalloc]` in pyproject.toml: options that a team shares.

    [tool.stalloc]
    gpu = "A100-80GB"        # for every verb that has such an option

    [tool.stalloc.diff]
    fail-over = "5%"

Contract: the file is the nearest one above the working folder; what is typed wins over what it says. Options that name
files to write are typed only. What no verb knows, or no such option takes, is one BadInputError.
"""

import argparse
import tomllib
from pathlib import Path
from typing import Any

from stalloc.errors import BadInputError
from stalloc.inputs import read_input

#: options that write, which is not for the file of a folder to say: it may be a stranger's
_WRITES = {"json", "output", "save_plan", "csv", "graph", "junit", "report", "update", "force", "keep_files", "help"}


def apply_shared(parser: argparse.ArgumentParser, names: tuple[str, ...], verbs: tuple[str, ...]) -> None:
    """Make the values in pyproject.toml the defaults of a verb's parser; of the tables in `names` the last one wins."""
    found = _table()
    if found is None:
        return
    file, table = found
    options = {action.dest: action for action in parser._actions if action.option_strings}
    for name, value in table.items():
        if isinstance(value, dict):
            if name not in verbs:
                raise BadInputError(f"{file}: [tool.stalloc.{name[:40]}] is not a verb: choose {', '.join(verbs)}.")
            continue
        if (dest := _dest(name)) in options:
            parser.set_defaults(**{dest: _value(file, name, options[dest], value)})
    for verb in names:
        for name, value in table.get(verb, {}).items():
            dest = _dest(name)
            if dest not in options or dest in _WRITES:
                raise BadInputError(
                    f"{file}: [tool.stalloc.{verb}] has no option {name[:40]!r} to share: see stalloc {verb} --help."
                )
            parser.set_defaults(**{dest: _value(file, name, options[dest], value)})


def refuse_typed(args: argparse.Namespace, why: str, *names: str) -> None:
    """Raise BadInputError if one of these options was typed, which belong to another use of the verb."""
    for name in names:
        if getattr(args, name) != args.parser.get_default(name):
            raise BadInputError(f"--{name.replace('_', '-')} {why}.")


def _table() -> tuple[Path, dict[str, Any]] | None:
    """The nearest pyproject.toml with such a table, and the table."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        if not file.is_file():
            continue
        try:
            table = tomllib.loads(read_input(file, "a TOML file").decode("utf-8")).get("tool", {}).get("stalloc")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInputError(f"{file} cannot be read as TOML ({error}): correct it.") from error
        if table is None:
            return None
        if not isinstance(table, dict):
            raise BadInputError(f"{file}: tool.stalloc is not a table: write [tool.stalloc].")
        return file, table
    return None


def _dest(name: str) -> str:
    return name.replace("-", "_")


def _value(file: Path, name: str, action: argparse.Action, value: Any) -> Any:
    """What the option would have if the value were typed."""
    wrong = f"{file}: {name[:40]} of tool.stalloc is {str(value)[:40]!r}"
    if _dest(name) in _WRITES:
        raise BadInputError(f"{wrong}: what is written is said on the command line only.")
    if isinstance(action, argparse._StoreTrueAction):
        if isinstance(value, bool):
            return value
        raise BadInputError(f"{wrong}: give true or false.")
    if isinstance(action, argparse._AppendAction):
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return value
        raise BadInputError(f"{wrong}: give a list of strings.")
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise BadInputError(f"{wrong}: give a string or a number.")
    try:
        made = action.type(str(value)) if callable(action.type) else str(value)
    except ValueError as error:
        raise BadInputError(f"{wrong}: {error}.") from error
    if action.choices is not None and made not in action.choices:
        raise BadInputError(f"{wrong}: choose from {', '.join(map(str, action.choices))}.")
    return made
