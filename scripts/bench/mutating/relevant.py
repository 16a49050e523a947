"""Which tests are asked about a change of a file: those of its folder, and those that are about its module."""

import re
from functools import cache
from pathlib import Path

#: tests of a folder of the package, whichever of its modules is changed
_OF_FOLDER = {
    "planner": "planner_validator planner_arrays planner_births planner_pieces planner_constraints planner_relations "
    "planner_search planner_tape planner_real planner_record regions",
    "lifespans": "lifespans_load lifespans_tape lifespans_periods lifespans_classes lifespans_unmarked planner_tape "
    "stats",
    "core": "runtime_heap runtime_page_heap growth runtime_replay runtime_handing runtime_shared_blocks runtime_arena "
    "runtime_tapes runtime_jumps runtime_strands runtime_full_tables integrations_streams regions runtime_pages "
    "runtime_shared_pages torch_statistics runtime_fuzz runtime_lasting",
    "runtime": "runtime_steps runtime_replay runtime_kinds runtime_arenas runtime_pages",
    "replay": "replay_models_rules replay_models replay_torch_record replay_torch replay_models_cupy simulate settings",
    "analysis": "explain error_causes error_log error_wordings stats top diff",
    "": "figures stats top explain",
}
#: the same of a module that tests do not name
_OF_MODULE = {"analysis/peak_use": "pytest_plugin", "analysis/size_text": "error_text"}


def relevant_tests(file: str, root: Path) -> list[str]:
    """Paths in the checkout, those about the module first."""
    path = Path(file)
    folder = path.parts[1] if len(path.parts) > 2 else ""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    stem = re.compile(rf"test_(\w+_)?{re.escape(path.stem.removesuffix('s'))}s?(_\w+)?\.py")
    named = re.compile(rf"{re.escape(module)}\b")
    own = [test for test, text in _texts(root).items() if stem.fullmatch(test.name) or named.search(text)]
    names = f"{_OF_MODULE.get(f'{folder}/{path.stem}', '')} {_OF_FOLDER.get(folder, _OF_FOLDER[''])}".split()
    others = [root / "tests" / f"test_{name}.py" for name in names]
    found = dict.fromkeys([*own, *(test for test in others if test.exists())])
    return [test.relative_to(root).as_posix() for test in found]


@cache
def _texts(root: Path) -> dict[Path, str]:
    return {test: test.read_text(encoding="utf-8") for test in sorted((root / "tests").glob("test_*.py"))}
