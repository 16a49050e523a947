"""What a new user types in the first hour: mistakes, pipes, settings that a team shares, places that are not there."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from warm_programs import run_stalloc, run_warm, without_compiling

from stalloc.cli import main

CSV = "id,lower,upper,size\n" + "".join(f"{row},{row},{row + 20},{512 * row + 512}\n" for row in range(300))


@pytest.fixture
def csv(tmp_path: Path) -> str:
    """A planning CSV."""
    (tmp_path / "p.csv").write_text(CSV)
    return str(tmp_path / "p.csv")


def typed(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """`stalloc …` in a process of its own."""
    command = [sys.executable, "-m", "stalloc", *arguments]
    return subprocess.run(command, text=True, check=False, timeout=300, **{"capture_output": True} | options)  # type: ignore[call-overload]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence of a mistake."""
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_verb_that_is_misspelt_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean explain?" in said(capsys, "explian", "x.pickle")
    assert "did you mean simulate?" in said(capsys, "simulat")
    assert "choose from stats, top" in said(capsys, "xyzzy")


def test_help_of_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for arguments in (["help", "top"], ["top", "--help"]):
        with pytest.raises(SystemExit) as ending:
            main(arguments)
        assert ending.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "docs/glossary.md" in shown[0]


def test_a_wrong_option_shows_the_usage_of_its_verb(csv: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["stats", "--nonsense", csv])
    assert ending.value.code == 2
    assert capsys.readouterr().err.startswith("usage: stalloc stats ")


@pytest.mark.parametrize("options", [("--capacity", "24"), ("--capacity", "80")])
def test_a_small_number_without_a_unit_is_asked_about(
    csv: str, capsys: pytest.CaptureFixture[str], options: tuple[str, str]
) -> None:
    assert f"without a unit: give {options[1]}GiB" in said(capsys, "simulate", csv, *options)
    assert "without a unit" in said(capsys, "dryrun", "--memory", options[1], __file__)


def test_a_part_of_the_name_of_one_gpu_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    from stalloc.device import find_gpu

    assert find_gpu("4090").name == "NVIDIA GeForce RTX 4090"
    assert find_gpu("L4").name == "NVIDIA L4"
    text = said(capsys, "dryrun", "--gpu", "A100", __file__)
    assert "may be one of several GPUs: choose A100-80GB or " in text
    assert " or A100-40GB" in text


def test_standard_input_is_read_and_called_so(csv: str) -> None:
    for name in ("-", "/dev/stdin"):
        done = typed("stats", name, input=CSV)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("standard input, device 0")


@pytest.mark.parametrize("verb", ["stats", "diff", "validate", "simulate", "top"])
def test_a_reader_that_goes_away_is_no_failure(csv: str, verb: str, tmp_path: Path) -> None:
    files = {"diff": [csv, csv], "validate": [str(tmp_path / "p.plan.npz"), csv]}.get(verb, [csv])
    if verb == "validate":
        assert main(["plan", csv, "-o", files[0]]) == 0
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run_stalloc(verb, *files, stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_full_standard_output_is_one_sentence(csv: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = run_stalloc("stats", csv, stdout=full.fileno())
    assert done.returncode == 2
    assert done.stderr == "stalloc: standard output cannot be written: No space left on device: send it elsewhere.\n"


def test_ctrl_c_in_any_verb_is_one_line(csv: str) -> None:
    source = (
        "import signal, sys, stalloc.trace as trace\n"
        "from stalloc.cli import main\n"
        "load = trace.load_traces\n"
        "def interrupted(file, **options):\n    signal.raise_signal(signal.SIGINT)\n    return load(file, **options)\n"
        "trace.load_traces = interrupted\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    for verb in ("stats", "top", "explain"):
        done = run_warm(source, verb, csv)
        assert (done.returncode, done.stderr) == (130, "stalloc: interrupted.\n")


def test_a_team_shares_options(csv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    file = tmp_path / "pyproject.toml"
    file.write_text('[tool.stalloc]\nalign = 4096\n[tool.stalloc.simulate]\nallocator = ["cupy"]\n')

    def bound(*options: str) -> int:
        assert main(["stats", csv, *options, "--json", "-"]) == 0
        return json.loads(capsys.readouterr().out)["devices"][0]["lower_bound_bytes"]

    assert bound() % 4096 == 0
    assert bound("--align", "512") < bound(), "what is typed wins"
    assert main(["simulate", csv, "--json", "-"]) == 0
    results = json.loads(capsys.readouterr().out)["devices"][0]["results"]
    assert [result["allocator"] for result in results] == ["cupy"]
    for wrong in (
        "[tool.stalloc]\nalign = true\n",
        "[tool.stalloc.stats]\nnonsense = 1\n",
        "[tool.stalloc.explian]\ntop = 1\n",
        '[tool.stalloc]\njson = "here"\n',
        "[tool.stalloc]\nalign = 'many'\n",
        "[tool.stalloc",
    ):
        file.write_text(wrong)
        assert "pyproject.toml" in said(capsys, "stats", csv)


def test_the_switch_takes_the_usual_words(run_program) -> None:
    source = "from stalloc.integrations.startup import arm; arm(); import sys; print('stalloc.runtime' in sys.modules)"
    for value in ("true", "True", "yes", "on", "1", "false", "off", "no", "0"):
        assert run_program(source, STALLOC=value).stderr == ""
    assert "STALLOC is 'maybe'" in run_program(source, STALLOC="maybe").stderr


def test_logs_that_move_a_tensor_to_another_storage_are_read(tmp_path: Path, capsys) -> None:
    lines = [
        {"INSTRUCTION": "CONSTANT", "NAME": "a"},
        {"INSTRUCTION": "MEMORY", "NAME": "a", "MEMORY": "1024"},
        {"INSTRUCTION": "CONSTANT", "NAME": "b"},
        {"INSTRUCTION": "MEMORY", "NAME": "b", "MEMORY": "2048"},
        {"INSTRUCTION": "MUTATE", "NAME": "op", "ARGS": ["a"], "MUTATE": [0], "TIME": "1"},
        {"INSTRUCTION": "COPY_FROM", "DST": "a", "SRC": "b"},  # nobody stands for the first storage any more
        {"INSTRUCTION": "RELEASE", "NAME": "b"},
        {"INSTRUCTION": "RELEASE", "NAME": "a"},
    ]
    file = tmp_path / "dtr.log"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["convert", str(file), str(tmp_path / "out.csv")]) == 0
    capsys.readouterr()
    assert (tmp_path / "out.csv").read_text().splitlines()[1:] == ["0,0,2,1024", "1,1,3,2048"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.usefixtures("cupy_installed", "cuda_torch")
def test_without_a_home_and_beside_read_only_packages_everything_works() -> None:
    """A container that runs as a nobody; it costs three sentences at most, of compiled code, the GPU and the plan."""
    root = Path(__file__).parents[1]
    place = Path(tempfile.mkdtemp(prefix="stalloc-nobody-"))
    try:
        shutil.copytree(root / "stalloc", place / "stalloc", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(root / "kernels", place / "stalloc" / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
        (place / "loop.py").write_text("import torch\nkept = [torch.empty(1 << 20, device='cuda') for _ in range(9)]\n")
        (place / "p.csv").write_text(CSV)
        for path in (place, *place.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        nobody = [*user, sys.executable, "-P", "-m", "stalloc"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("STALLOC", "XDG", "NUMBA"))}
        environment = {**clean, "HOME": "/nonexistent", "PYTHONPATH": str(place)}
        for command, most in ((["stats", "p.csv"], 1), (["run", "--device", "virtual", "loop.py"], 3)):
            done = subprocess.run(
                [*nobody, *command],
                cwd=place,
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if "No module named" in done.stderr or "Permission denied: '/root" in done.stderr:
                pytest.skip("this Python cannot be used by others")
            assert done.returncode == 0, done.stderr
            lines = without_compiling(done.stderr).splitlines()
            assert len(lines) <= most, done.stderr
            assert all(line.startswith("stalloc: ") for line in lines), done.stderr
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(place)], check=True)
        shutil.rmtree(place)


def test_each_term_of_a_report_is_in_the_glossary() -> None:
    page = (Path(__file__).parents[1] / "docs" / "glossary.md").read_text(encoding="utf-8").lower()
    terms = ("hard fragmentation", "soft fragmentation", "scoped", "persistent", "transient", "lower bound")
    for term in (*terms, "whole on the plan", "hit rate", "needs", "takes", "settled", "watched", "pinned", "capacity"):
        assert f"**{term}**" in page, term


def test_traces_plans_and_explanations_are_a_table_in_a_notebook(csv: str) -> None:
    from stalloc.analysis import explain
    from stalloc.planner import plan
    from stalloc.trace import load_traces

    (trace,) = load_traces(csv)
    made = plan(trace)
    assert repr(trace) == "<Trace of device 0: 300 requests, 319 events, 2.84 MiB at the peak, from planning csv>"
    assert repr(made).startswith("<Plan of device 0: 300 of 300 requests, peak ")
    hostile = trace.replace(info={**trace.info, "source": "<script>\n"})
    for value in (trace, made, hostile):
        assert "\n" not in repr(value)
    assert "<th style='text-align:left'>soft fragmentation</th>" in explain(trace)._repr_html_()
    for value in (trace, made, hostile, explain(hostile)):
        shown = value._repr_html_()
        assert shown.startswith("<table>")
        assert "<script>" not in shown


def test_a_report_is_one_line_and_a_table(run_program, cupy_installed) -> None:
    done = run_program(
        "import stalloc; stalloc.install(device='virtual'); import cupy; kept = cupy.empty(1 << 20, cupy.uint8)\n"
        "(report,) = stalloc.statistics(); print(report); print(report._repr_html_())"
    )
    line, table = done.stdout.splitlines()
    assert line.startswith("<Report of device 0: observing, reserved ")
    assert table.startswith("<table><caption>device 0: virtual NVIDIA H200</caption>")
