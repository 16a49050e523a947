"""stalloc fit: an unmodified program on less memory than it needs, from the first allocation on."""

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs.fitting_checks import BUDGET, PROGRAM, SMALL, TRAIN, fit, program, stalloc
from properties import variants
from warm_programs import run_warm

from stalloc.cli import main
from stalloc.errors import BadInputError
from stalloc.fitting.fit_record import load_fit
from stalloc.fitting.keeping import plans_of
from stalloc.fitting.policy_search import check_policy
from stalloc.fitting.systems import SYSTEMS, System
from stalloc.planner import plans_to_bytes

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A folder with the fit of a small GPT, what was found, and what was printed."""
    folder = tmp_path_factory.mktemp("fit")
    result, done = fit(folder, "--budget", BUDGET, TRAIN, *SMALL)
    return folder, result, done.stdout


FROM_CODE = (
    "import stalloc\nmade = stalloc.budget('118MiB', device='virtual')\n"
    + PROGRAM
    + """
report = stalloc.statistics()[0]
print(json.dumps([report.run_reserved_peak_bytes, report.phase, made.candidates[made.best].what]))
"""
)


def test_what_fits_is_found_and_the_program_as_it_is_comes_first(fitted: tuple[Path, dict[str, Any], str]) -> None:
    _, found, shown = fitted
    as_it_is, best = found["candidates"][0], found["candidates"][found["best"]]
    assert as_it_is["what"] == "as it is"
    assert not as_it_is["fits"]
    assert as_it_is["factor"] == 1.0
    assert best["fits"]
    assert best["needed_bytes"] <= found["budget_bytes"] == 120 << 20 < as_it_is["needed_bytes"]
    assert best["added_seconds"] == min(one["added_seconds"] for one in found["candidates"] if one["fits"])
    assert found["least_bytes"] == min(one["needed_bytes"] for one in found["candidates"])
    for one in found["candidates"]:
        assert one["expected_bytes"] == pytest.approx(one["allocated_bytes"], rel=0.002)
        assert one["allocated_bytes"] <= one["native_bytes"]
        assert one["checked"] == ("run, 6 steps" if one["fits"] else "run, 3 steps")
    assert [line for line in shown.splitlines() if line.lstrip().startswith("*")]
    assert f"next: stalloc run --budget {BUDGET} {TRAIN}" in shown


@pytest.mark.slow
def test_what_pytorch_reserves_is_what_a_run_under_its_allocator_does(
    fitted: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    stalloc(tmp_path, "dryrun", "--json", "dryrun.json", TRAIN, *SMALL)
    native = json.loads((tmp_path / "dryrun.json").read_text())["native"]
    assert fitted[1]["candidates"][0]["native_bytes"] == native["taken_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["checkmate", "remat-aware"])
def test_a_policy_by_name_is_the_only_one_tried(tmp_path: Path, policy: str) -> None:
    if policy == "checkmate":
        pytest.importorskip("scipy.optimize")
    found, _ = fit(tmp_path, "--budget", BUDGET, "--policy", policy, TRAIN, *SMALL)
    name = {"remat-aware": "keep-attention"}.get(policy, policy)
    assert {one["technique"] for one in found["candidates"]} == {"none", name}
    best = found["candidates"][found["best"]]
    assert best["fits"]
    assert best["technique"] == name
    assert best["expected_bytes"] == pytest.approx(best["allocated_bytes"], rel=0.002)


def test_a_run_keeps_its_budget_from_the_first_allocation(fitted: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, _ = fitted
    done = stalloc(folder, "run", "--device", "virtual", "--budget", BUDGET, "--json", "run.json", TRAIN, *SMALL)
    told = json.loads((folder / "run.json").read_text())
    assert told["plan_source"] == "fit"
    assert told["budget_kept"]
    assert 0 < told["run_reserved_peak_bytes"] <= told["budget_bytes"] == 120 << 20
    assert told["hit_rate"] >= 0.999
    assert told["budget_by"] == found["candidates"][found["best"]]["what"]
    assert "budget 120.00 MiB: kept" in done.stdout
    assert "fitted anew" not in done.stderr


@pytest.mark.slow
def test_a_fit_of_arguments_that_ask_for_other_memory_is_not_used(
    fitted: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    (tmp_path / "train_gpt.fit.npz").write_bytes((fitted[0] / "train_gpt.fit.npz").read_bytes())
    words = ("--device", "virtual", "--budget", BUDGET, "--json", "run.json", TRAIN, *SMALL, "--batch", "48")
    done = stalloc(tmp_path, "run", *words)
    assert "is not used: it was made for the arguments --size tiny --batch 64 --steps 6, and the" in done.stderr
    assert json.loads((tmp_path / "run.json").read_text())["budget_kept"]
    assert load_fit(tmp_path / "train_gpt.fit.npz").program.arguments[-1] == "48"


@pytest.mark.slow
def test_a_fit_of_a_program_that_asks_for_the_same_is_used(tmp_path: Path) -> None:
    """Another argument, a comment, another GPU: none of it matters to what the first steps ask for."""
    file = program(tmp_path)
    fit(tmp_path, "--budget", "1GiB", "--policy", "blocks:1", "--keep-files", file, 5)
    num_runs = len((tmp_path / "seen.txt").read_text().splitlines())
    run = ("run", "--device", "virtual", "--budget", "1GiB", "--keep-files")  # what it writes tells how often it ran
    assert ".fit.npz" not in stalloc(tmp_path, *run, "--gpu", "A100-80GB", file, 5).stderr, "it is of any GPU"
    done = stalloc(tmp_path, *run, file, 5, "--save", "ck.pt")
    assert "program.fit.npz is used: it was made for the arguments 5, but the first steps of this one" in done.stderr
    assert "budget 1.00 GiB: kept (as it is)" in done.stdout
    assert len((tmp_path / "seen.txt").read_text().splitlines()) == num_runs + 3, "two runs, and one look"
    file.write_text(f"# new\n{PROGRAM}")
    done = stalloc(tmp_path, *run, "--same", file, 5, "--save", "ck.pt")
    assert "is used with --same, though it was made for another program (program.py) or an older state" in done.stderr
    assert len((tmp_path / "seen.txt").read_text().splitlines()) == num_runs + 4


@pytest.mark.slow
def test_a_budget_that_nothing_keeps_is_one_sentence_with_the_least(tmp_path: Path) -> None:
    words = ("--budget", "1MiB", TRAIN, *SMALL)
    (tmp_path / "train_gpt.fit.npz").write_text("of yesterday")
    found, done = fit(tmp_path, *words, code=1)
    assert (tmp_path / "train_gpt.fit.npz").read_text() == "of yesterday", "nothing is lost for a fit that is none"
    assert found["output"] is None
    assert found["best"] == -1
    assert 0 < found["least_bytes"] < found["candidates"][0]["needed_bytes"]
    assert "next:" not in done.stdout
    sentence = done.stderr.strip().splitlines()[-1]
    assert sentence.startswith("stalloc: train_gpt.py cannot be kept within 1.00 MiB: the least that was reached is ")
    assert sentence.endswith("give that much, or a smaller batch.")


@pytest.mark.slow
def test_a_run_within_a_budget_that_nothing_keeps_is_the_same_sentence(tmp_path: Path) -> None:
    words = ("--device", "virtual", "--budget", "1MiB", TRAIN, *SMALL)
    said = stalloc(tmp_path, "run", *words, code=125).stderr.strip().splitlines()
    assert said[-1].startswith("stalloc: train_gpt.py cannot be kept within 1.00 MiB: the least that was reached is ")


@pytest.mark.slow
def test_a_budget_from_code_is_fitted_once_and_kept(tmp_path: Path) -> None:
    program(tmp_path, FROM_CODE)
    environment = {**os.environ, "STALLOC_CACHE": "off"}
    told = []
    for _ in range(2):
        command = [sys.executable, "program.py", "5"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (kept,) = tmp_path.glob("*.fit.npz")
        told.append((*json.loads(done.stdout.splitlines()[-1]), kept.stat().st_mtime_ns))
    assert told[0] == told[1], "the second run has the fit of the first"
    assert told[0][0] <= 118 << 20
    assert told[0][1] == "running on the plan"
    assert told[0][2].startswith("recompute ")
    seen = [json.loads(line)[0] for line in (tmp_path / "seen.txt").read_text().splitlines()]
    assert seen == [None, None], "what trials write is discarded"


@pytest.mark.slow
def test_fit_from_code_gives_the_record(tmp_path: Path) -> None:
    source = (
        "import stalloc, json, sys\n"
        "made = stalloc.fit(sys.argv[1:], budget='66MiB', gpu='A100-80GB', output='mine.fit.npz', policy='blocks:2')\n"
        "print(json.dumps([made.program.gpu, made.best, [one.what for one in made.candidates], made.least_bytes]))\n"
    )
    done = run_warm(source, program(tmp_path), 5, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    gpu, best, ways, least = json.loads(done.stdout.splitlines()[-1])
    assert gpu == "NVIDIA A100-SXM4-80GB"
    assert ways[best] == "recompute 2 whole blocks"
    assert load_fit(tmp_path / "mine.fit.npz").least_bytes == least <= 66 << 20


def test_a_fit_whose_plan_would_make_tensors_overlap_is_not_used(fitted: tuple[Path, dict[str, Any], str]) -> None:
    file = fitted[0] / "train_gpt.fit.npz"
    fit = load_fit(file)
    plans = plans_of(fit, file)
    assert plans is not None
    assert plans_of(replace(fit, plan=b""), file) is None
    overlapping = replace(plans[0], schedule_offset=0 * plans[0].schedule_offset, offset=0 * plans[0].offset)
    with pytest.raises(BadInputError, match="its plan is not valid"):
        plans_of(replace(fit, plan=plans_to_bytes([overlapping])), file)
    with pytest.raises(BadInputError, match="its plan is damaged"):
        plans_of(replace(fit, plan=b"PK?"), file)


def test_a_policy_that_a_program_has_nothing_for_is_said_to_be_none(tmp_path: Path) -> None:
    found, done = fit(tmp_path, "--budget", "1MiB", "--policy", "selective", TRAIN, *SMALL, code=1)
    assert [one["technique"] for one in found["candidates"]] == ["none"]
    sentence = done.stderr.strip().splitlines()[-1]
    assert sentence.startswith("stalloc: train_gpt.py has nothing that selective applies to, and as it is it reserves ")
    assert sentence.endswith("more than 1.00 MiB: try another policy, or all of them without --policy.")
    assert "selective finds nothing to recompute: attention is one fused operation here" in done.stdout


@variants("name", ["expandable", "gmlake"])
def test_the_command_of_a_replayed_allocator_shows_it(tmp_path: Path, name: str) -> None:
    (system,) = [one for one in SYSTEMS if one.name == name]
    (tmp_path / "rows.csv").write_text("id,lower,upper,size\n1,0,9,1048576\n2,3,12,4194304\n")
    done = stalloc(tmp_path, *system.where.split()[1:], "rows.csv", "--json", "models.json")
    assert name in done.stdout
    assert name in (tmp_path / "models.json").read_text()


_BLANKS = {"FOLDER:SIZE": ".:1GiB", "SIZE": "1GiB", "…": "1GiB", "SHARE": "0.5", "N": "2", "K": "2"}


@pytest.mark.parametrize("name", [one.name for one in SYSTEMS if one.where.startswith("stalloc ")])
def test_what_a_row_says_to_type_lacks_nothing_but_a_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (system,) = [one for one in SYSTEMS if one.name == name]
    command = re.split(r" \(|, ", system.where)[0]
    words = [
        re.sub("FOLDER:SIZE|SIZE|…|SHARE|\\b[NK]\\b", lambda blank: _BLANKS[blank[0]], word) for word in command.split()
    ]
    with contextlib.suppress(SystemExit):
        assert main([*words[1:], "no_such_file"]) != 0
    error = capsys.readouterr().err
    assert "no_such_file" in error
    assert "usage:" not in error


def test_every_system_has_an_honest_status(tmp_path: Path) -> None:
    done = stalloc(tmp_path, "policies", "--json", "systems.json")
    systems = json.loads((tmp_path / "systems.json").read_text())["systems"]
    assert len(systems) >= 35
    assert len({one["name"] for one in systems}) == len(systems)
    assert {one["status"] for one in systems} <= {"executes", "in part", "emulates", "replays", "reports"}
    in_part = {one["name"] for one in systems if one["status"] == "in part"}
    assert in_part == {"zero-r", "dtp", "tma", "tsplit", "moe-cache", "zero++", "paro", "amsp", "rtp"}
    assert not [one for one in systems if "not yet" in " ".join(one.values())]
    assert not [one for one in systems if one["name"] == "remat-aware"], "one name for one executor"
    assert all(one["where"] for one in systems)
    assert "checkmate" in done.stdout
    shown = stalloc(tmp_path, "policies", "--tests").stdout
    assert all(one["test"] in shown for one in systems)


def _tests_of_rows() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in SYSTEMS:
        file, _, name = one.test.partition("::")
        found.setdefault(file, set()).add(name)
    return found


@pytest.mark.parametrize("file", _tests_of_rows())
def test_what_a_row_is_held_to_by_is_a_test(file: str) -> None:
    defined = {
        node.name
        for node in ast.parse((Path(__file__).parent / file).read_text()).body
        if hasattr(node, "decorator_list")
    }
    assert _tests_of_rows()[file] <= {name for name in defined if name.startswith("test_")}


@pytest.mark.slow
def test_what_rows_are_held_to_by_is_collected() -> None:
    words = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-m", "", *{one.test for one in SYSTEMS}]
    done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert all(one.test in done.stdout for one in SYSTEMS)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda one: one.name)
def test_a_fit_takes_each_policy_that_applies_and_says_what_to_type_for_others(system: System) -> None:
    words = system.where.removeprefix("stalloc fit --policy ").split()
    if words[0] != system.where.split()[0]:
        check_policy(words[0].rstrip(",").replace(":N", ":2").replace(":SHARE", ":0.5"))
    elif system.name != "recompute":
        with pytest.raises(BadInputError, match=re.escape(f"{system.name} is not tried by a fit")) as error:
            check_policy(system.name)
        assert system.where in str(error.value)


def test_what_rows_say_to_call_is_there(run_checks: Callable[..., dict[str, bool]]) -> None:
    names = [one.where for one in SYSTEMS if one.where.startswith("stalloc.")]
    source = f"import json, pkgutil\nprint(json.dumps({{one: callable(pkgutil.resolve_name(one)) for one in {names}}}))"
    assert run_checks(source) == dict.fromkeys(names, True)


def test_the_package_loads_no_torch(run_fresh: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    source = "import sys, stalloc, stalloc.fitting, stalloc.techniques, stalloc.cost, stalloc.fitting.fit_record\n"
    source += "assert not {'torch', 'scipy', 'cupy'} & set(sys.modules)"
    assert run_fresh(source).returncode == 0
