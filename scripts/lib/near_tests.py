"""Prints the test files that are nearest to a file, by who imports it: for `scripts/test --near FILE`.

Those that import FILE itself, or a name that its package hands on from it; for a verb those that run it. If there are
none, the same is asked of the modules that import FILE, and so on, until there are some. This is for a quick look
while changing FILE: what breaks further away only the whole suite finds.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def module_name(path: Path) -> str:
    """A module as imports name it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("stalloc", *parts) if parts[0] == "kernels" else parts[1:] if parts[0] == "tests" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def import_graph() -> tuple[dict[str, Path], dict[str, set[str]]]:
    sources = [path for folder in ("stalloc", "kernels", "tests") for path in (ROOT / folder).rglob("*.py")]
    modules = {module_name(path): path for path in sources}
    owners = handed_on(modules)
    return modules, {name: set(imported(path, owners)) for name, path in modules.items()}


def imported(path: Path, owners: dict[str, str]) -> Iterator[str]:
    """The modules that a file imports anywhere; `owners`: the modules that have the names that packages hand on."""
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            for one in node.names:
                whole = f"{name}.{one.name}"
                yield owners.get(whole, whole)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # what is loaded by its name
            name = node.value  # a sibling's name counts in the package alone: registries have it
            siblings = package and (path.parent / f"{name}.py").is_file() if name.isidentifier() else False
            yield ".".join([*package, name]) if siblings else ".".join(package) + name if name[:1] == "." else name


def handed_on(modules: dict[str, Path]) -> dict[str, str]:
    """`stalloc.replay.simulate` -> `stalloc.replay.simulation`: names that a package imports, or loads when used."""
    owners = {}
    for name, path in modules.items():
        if path.name != "__init__.py":
            continue
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                owners |= {f"{name}.{one.asname or one.name}": node.module for one in node.names}
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    texts = [getattr(part, "value", None) for part in (key, value)]
                    if isinstance(texts[0], str) and isinstance(texts[1], str) and texts[1].startswith("."):
                        owners[f"{name}.{texts[0]}"] = name + texts[1]
    return owners


def near_tests(file: Path) -> list[Path]:
    """The nearest tests, as paths; a test file is nearest to itself."""
    if file.name.startswith("test_"):
        return [file]
    modules, by = import_graph()
    tests = {name for name, path in modules.items() if path.name.startswith("test_")}
    wave, seen = {module_name(file)}, set()
    while wave:
        seen |= wave
        verbs = [name.rpartition(".")[2] for name in wave if name.startswith("stalloc.cli.")]
        typed = [rf'([(\[*]|"stalloc", )"{verb}"[,\]) ]' for verb in verbs]  # first in a call, a list, or a command
        texts = {name: modules[name].read_text("utf-8") for name in tests} if verbs else {}
        runs = {name for name, text in texts.items() if any(re.search(one, text) for one in typed)}
        near = {name for name in tests if by[name] & wave} | runs
        if near:
            return sorted(modules[name] for name in near)
        wave = {name for name in modules if by[name] & wave} - seen
    return []


def main() -> int:
    """Print the paths, one a line; 2 for what is no module, 1 if no test is near."""
    file = Path(sys.argv[1]).resolve()
    if not file.is_file() or file.suffix != ".py" or not file.is_relative_to(ROOT):
        print(f"--near {sys.argv[1]}: give a Python file of the checkout.", file=sys.stderr)
        return 2
    found = near_tests(file)
    if not found:
        print(f"--near {sys.argv[1]}: no test imports it, nor what imports it.", file=sys.stderr)
        return 1
    print("\n".join(str(path.relative_to(ROOT)) for path in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
