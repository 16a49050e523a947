"""Which tests are asked about a change of a file: those of its folder, and those that are about its module."""

import re
from functools import cache
from pathlib import Path

#: tests of a folder of the package, whichever of its modules is changed
_OF_FOLDER = {
    "planner": "planner_validator planner_arrays planner_births planner_pieces planner_constraints planner_relations "
    "planner_search planner_schedule planner_real planner_record regions",
    "lifespans": "lifespans_load lifespans_schedule lifespans_periods lifespans_classes lifespans_unmarked "
    "planner_schedule stats",
    "core": "runtime_heap runtime_page_heap growth runtime_replay runtime_handing runtime_shared_blocks runtime_arena "
    "runtime_schedules runtime_full_tables integrations_streams regions runtime_pages "
    "runtime_shared_pages torch_statistics runtime_fuzz",
    "runtime": "runtime_steps runtime_replay runtime_kinds runtime_arenas runtime_pages",
    "replay": "replay_models_rules replay_models replay_torch_record replay_torch replay_models_cupy simulate settings",
    "analysis": "explain error_causes error_log error_wordings stats top diff",
    "": "figures stats top explain",
}
#: those of a module that have most to say about it, and are asked first
_OF_MODULE = {
    "planner/overlaps": "planner_validator",
    "planner/verdict": "planner_validator",
    "planner/stream_check": "planner_validator planner_record",
    "planner/kinds_check": "runtime_admission planner_relations",
    "planner/problem": "planner_pieces planner_arrays",
    "planner/best_fit_by_birth": "planner_births",
    "planner/hole_filling": "planner_constraints planner_schedule",
    "planner/placement": "planner_arrays planner_relations",
    "planner/orders": "planner_arrays",
    "planner/cycle": "planner_schedule",
    "planner/sharing": "planner_schedule planner_record",
    "planner/layout": "planner_arrays",
    "lifespans/load_curves": "lifespans_load stats",
    "core/requests": "runtime_replay",
    "core/segments": "runtime_heap",
    "core/handovers": "runtime_handing integrations_streams",
    "core/pages": "runtime_page_heap runtime_pages",
    "core/lending": "runtime_arena runtime_replay runtime_partly_dynamic",
    "core/frees": "runtime_shared_blocks integrations_streams",
    "core/counters": "torch_statistics runtime_replay runtime_steps",
    "core/schedule_cursor": "runtime_replay runtime_partly_dynamic",
    "core/arena_schedule": "runtime_schedules",
    "runtime/allowance": "runtime_partly_dynamic",
    "runtime/warm_ups": "torch_graphs",
    "replay/torch_cache": "replay_torch replay_torch_record replay_torch_oracle",
    "replay/simulation": "simulate",
    "analysis/error_text": "error_causes error_wordings",
    "analysis/moments": "stats",
    "analysis/holders": "top",
    "analysis/comparison": "diff pytest_plugin",
}


def relevant_tests(file: str, root: Path) -> list[str]:
    """Paths in the checkout, those that have most to say about the module first."""
    path = Path(file)
    folder = path.parts[1] if len(path.parts) > 2 else ""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    stem = re.compile(rf"test_(\w+_)?{re.escape(path.stem.removesuffix('s'))}s?(_\w+)?\.py")
    named = re.compile(rf"{re.escape(module)}\b")
    own = [test for test in _texts(root) if stem.fullmatch(test.name)]
    naming = [test for test, text in _texts(root).items() if named.search(text)]
    first, rest = (
        [root / "tests" / f"test_{name}.py" for name in names.split()]
        for names in (_OF_MODULE.get(f"{folder}/{path.stem}", ""), _OF_FOLDER.get(folder, _OF_FOLDER[""]))
    )
    found = dict.fromkeys(test for test in (*first, *own, *rest, *naming) if test.exists())
    return [test.relative_to(root).as_posix() for test in found]


@cache
def _texts(root: Path) -> dict[Path, str]:
    return {test: test.read_text(encoding="utf-8") for test in sorted((root / "tests").glob("test_*.py"))}
