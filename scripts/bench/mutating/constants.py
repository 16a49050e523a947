"""The numbers that decide, each halved and each doubled.

Contract: found are the constants of modules, whose names are in capitals: `NAME = 1 / 8`, `A, B = 3, 4 << 20`; in a
table of thresholds the defaults of fields, too, `share: float = 0.5`, and the first number of what makes an entry,
`LIMIT = Threshold(16, …)`. Left out are numbers that decide nothing: codes, layouts, and what a change only breaks.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from changed import ROOT, Change

THRESHOLDS = "stalloc/runtime/thresholds.py"
_NAME = re.compile(r"_?[A-Z][A-Z0-9_]*")
#: names that say that a number stands for something, or is as wide as a field
_CODES = re.compile(
    r"_?(NO_\w+|ACTION_\w+|BLOCK_\w+|CLOCK|MODE_\w+|\w+_KIND|\w+_KINDS|\w+_BITS|\w+_MASK|\w+_USER|AT_\w+|USE_\w+|POOL_\w+|"
    r"BYPASS\w*|APART_\w+|POLL\w*|NEED_\w+|ASKED|HEAP_ONLY|GOT_PAGES|KNOWN|\w+_CLOCK|\w*WORDS?|NOT_READY|DONT_NEED|DRIVER_STATUS|UNMAPPED|NEVER|HASH|NOISE|ALL|MANY|WORK|PER_THREAD|ROWS|FULL_\w+)"
)


def files_with_numbers(root: Path = ROOT) -> list[str]:
    """Where numbers that decide stand: in one table, or else all over the runtime and the core."""
    if (root / THRESHOLDS).exists():
        return [THRESHOLDS]
    found = [*(root / "stalloc" / "runtime").glob("*.py"), *(root / "stalloc" / "core").glob("*.py")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def halved_and_doubled(files: Sequence[str], root: Path = ROOT) -> list[Change]:
    return [change for file in files for change in _changes(file, (root / file).read_text(encoding="utf-8"))]


def _changes(file: str, source: str) -> Iterator[Change]:
    for statement, name, value in _numbers(ast.parse(source), is_table=Path(file).name == Path(THRESHOLDS).name):
        whole, number = (ast.get_source_segment(source, node) or "" for node in (statement, value))
        begin = _place(statement, value, source)
        for factor in ("halved", "doubled"):
            text = _scaled(value, number, factor)
            if text is not None:
                yield Change(
                    name=f"{file.removeprefix('stalloc/').removesuffix('.py')}:{name} {factor}",
                    file=file,
                    old=f"\n{' ' * statement.col_offset}{whole}",
                    new=f"\n{' ' * statement.col_offset}{whole[:begin]}{text}{whole[begin + len(number) :]}",
                    why=f"{number} is {text}",
                )


def _place(statement: ast.stmt, value: ast.expr, source: str) -> int:
    """Where in the text of a statement one of its values begins."""
    lines = source.splitlines(keepends=True)

    def at(node: ast.stmt | ast.expr) -> int:
        before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
        return sum(map(len, lines[: node.lineno - 1])) + len(before)

    return at(value) - at(statement)


def _numbers(module: ast.Module, is_table: bool) -> Iterator[tuple[ast.stmt, str, ast.expr]]:
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            for field in node.body if is_table else ():
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
                    yield from (
                        (field, f"{node.name}.{name}", value)
                        for name, value in _named(field.target, field.value, is_table)
                    )
            continue
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if len(targets) == 1 and value is not None:
            for name, number in _named(targets[0], value, is_table):
                if _NAME.fullmatch(name.partition("[")[0]) and not _CODES.fullmatch(name.partition("[")[0]):
                    yield node, name, number


def _named(target: ast.expr, value: ast.expr, is_table: bool) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from _named(one, its, is_table)
    elif isinstance(target, ast.Name):
        if isinstance(value, ast.Tuple):
            for index, its in enumerate(value.elts):
                if _is_number(its):
                    yield f"{target.id}[{index}]", its
        elif isinstance(value, ast.Call) and is_table:
            given = [*value.args, *(keyword.value for keyword in value.keywords)]
            yield from ((target.id, its) for its in [one for one in given if _is_number(one)][:1])
        elif _is_number(value):
            yield target.id, value


def _is_number(value: ast.expr) -> bool:
    """Whether an expression is of numbers and names in capitals, with a number that is not negative among them."""
    parts = list(ast.walk(value))
    allowed = (ast.Constant, ast.BinOp, ast.operator, ast.Name, ast.Load)
    if not all(isinstance(part, allowed) for part in parts):
        return False
    constants = [part.value for part in parts if isinstance(part, ast.Constant)]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    are_numbers = all(type(one) in (int, float) for one in constants)
    return bool(constants) and are_numbers and all(_NAME.fullmatch(name) for name in names)


def _scaled(value: ast.expr, text: str, factor: str) -> str | None:
    """Half or twice a number; None where that is the same number."""
    inner = text if isinstance(value, ast.Constant) else f"({text})"
    if factor == "doubled":
        return None if isinstance(value, ast.Constant) and value.value == 0 else f"{inner} * 2"
    is_whole = not any(
        isinstance(part, ast.Div) or (isinstance(part, ast.Constant) and isinstance(part.value, float))
        for part in ast.walk(value)
    )
    if isinstance(value, ast.Constant) and value.value == 0:
        return None
    return f"{inner} // 2" if is_whole else f"{inner} / 2"
