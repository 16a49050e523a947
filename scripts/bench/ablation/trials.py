"""What is tried with rules switched off: python trials.py FOLDER, with changes and trials on standard input.

Contract: a line of JSON for each trial, as it comes to its end. Changes of the runtime and of the planner are made as
their modules are imported; those of anything else need a copy of the checkout.
"""

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from changed import Change
from harm.catalogue import ROOT, programs
from harm.judging import SEEN_BEFORE, hit_rates
from harm.running import Setting, run

AMPLE_BYTES = 80 << 30
CHANGED_IN_PLACE = ("stalloc/runtime/", "stalloc/planner/")  #: whose modules are imported anew for each change
_IMPORTED_ANEW = (
    *(folder.rstrip("/").replace("/", ".") for folder in CHANGED_IN_PLACE),
    "stalloc.replay",
    "ablation.replaying",
)  #: they, and what has them


@dataclass(frozen=True)
class Trial:
    kind: str  #: "program": a recorded one; "live": one that runs; "changing", "tight": a random one
    name: str  #: or its seed
    capacity_bytes: int = AMPLE_BYTES

    @property
    def key(self) -> str:
        size = "ample" if self.capacity_bytes == AMPLE_BYTES else f"in {self.capacity_bytes >> 20} MiB"
        return f"{self.kind} {self.name} {size}"


def figures(trial: Trial, recordings: Path) -> dict[str, Any]:
    if trial.kind == "live":
        return _live(trial)
    from ablation.replaying import Recording, replay  # each fork has a runtime of its own

    file = trial.name if trial.kind == "program" else f"{trial.kind}-{trial.name}"
    parts = [replay(one, trial.capacity_bytes) for one in Recording.load(recordings / f"{file}.npz")]
    steps = [step for part in parts for step in part["steps"]]
    rates = [hit_rates(part["steps"]) for part in parts]
    known = [rate for _, rate in rates if rate is not None]
    return {
        "completes": all(part["completes"] for part in parts),
        "peak_bytes": sum(part["peak_bytes"] for part in parts),
        "hit_rate": float(np.mean([rate or 0.0 for rate, _ in rates])),
        "known_hit_rate": float(np.mean(known)) if known else None,
        "steps": len(steps),
        "steady_calls": sum(_steady_steps_with_calls(part["steps"]) for part in parts),
        "seconds": round(sum(part["seconds"] for part in parts), 4),
        "step_ms": round(1e3 * sum(part["step_seconds"] for part in parts), 4),
        "plans": sum(part["plans"] for part in parts),
        "dropped": sum(part["dropped"] for part in parts),
        "note": " ".join(part["note"] for part in parts).strip(),
    }


def _live(trial: Trial) -> dict[str, Any]:
    program = next(one for one in programs() if one.name == trial.name)
    outcome = run(program, Setting.STALLOC, trial.capacity_bytes)
    if not outcome.is_complete:
        return {"completes": False, "note": outcome.last_line, "peak_bytes": 0, "hit_rate": 0.0, "known_hit_rate": None,
                "steps": 0, "steady_calls": 0, "step_ms": 0.0}  # fmt: skip
    steps, maps = outcome.seen["steps"], [0, *(step["maps"] for step in outcome.seen["steps"])]
    rate, known = hit_rates(steps)
    for step, before in zip(steps, maps, strict=False):
        step["calls"] = step["maps"] - before
    return {
        "completes": True,
        "peak_bytes": outcome.peak_bytes,
        "hit_rate": rate,
        "known_hit_rate": known,
        "steps": len(steps),
        "steady_calls": _steady_steps_with_calls(steps),
        "step_ms": 0.0,
        "plans": outcome.seen["plans_made"],
        "note": " ".join(outcome.seen["gave_up"]),
    }


def _steady_steps_with_calls(steps: list[dict[str, Any]]) -> int:
    """Steps of the last half, of kinds that had been seen three times, in which pages were mapped or unmapped."""
    seen: dict[str, int] = {}
    found = 0
    for number, step in enumerate(steps):
        found += 2 * number >= len(steps) and seen.get(step["kind"], 0) >= SEEN_BEFORE and step["calls"] > 0
        seen[step["kind"]] = seen.get(step["kind"], 0) + 1
    return found


class _Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: Path, text: str) -> None:
        super().__init__(name, str(path))
        self._text = text

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_code(self, fullname: str) -> Any:
        return compile(self._text, self.path, "exec")


def change(changes: list[dict[str, str]]) -> None:
    texts: dict[str, str] = {}
    for one in changes:
        text = texts.setdefault(one["file"], (ROOT / one["file"]).read_text(encoding="utf-8"))
        texts[one["file"]] = Change(**one).applied_to(text)
    for file, text in texts.items():
        name = file.removesuffix(".py").replace("/", ".")
        sys.meta_path.insert(0, _Changed(name, ROOT / file, text))


def run_all(trials: list[Trial], recordings: Path) -> None:
    fired: set[str] = set()
    builtins.fired = lambda name: fired.add(name) is None  # type: ignore[attr-defined]  # see rules.toml
    for trial in trials:
        fired.clear()
        try:
            found = figures(trial, recordings)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"trial": trial.key, **found, "fired": sorted(fired)}), flush=True)


def main() -> None:
    """Do what lines of JSON on standard input ask for, each in a fork that imports the runtime anew."""
    recordings = Path(sys.argv[1])
    warm = [Trial("program", path.stem) for path in sorted(recordings.glob("*.npz"))[:1]]
    for trial in warm:
        figures(trial, recordings)  # compiled code is loaded once for all
    for name in list(sys.modules):
        if name.startswith(_IMPORTED_ANEW):
            del sys.modules[name]
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                change(asked["changes"])
                run_all([Trial(**one) for one in asked["trials"]], recordings)
                code = 0
            finally:
                os._exit(code)
        print(json.dumps({"child": child}), flush=True)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"ended": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
