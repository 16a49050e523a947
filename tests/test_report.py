"""`stalloc report`: a page of one file whose figures are those of the other verbs, whatever the trace holds."""

import base64
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import OURS, counted, each, path_of
from test_timeline import ITERATION, written
from test_top import write_leak
from warm_programs import run_stalloc

import stalloc
from stalloc.cli import main
from stalloc.writers.page.address_map import LARGEST_IN_COLUMN, detail_levels

QUICK = (
    *("gpus.pickle.gz", "streams.pickle.gz", "lifespans.csv.gz", "profile.json.gz"),
    *("gnn_llm_3gpu_expandable_oom.pickle.gz", "somas_resnet50.csv.gz"),
)
OTHERS = (
    "llm_quantize_sqattn.pickle.gz",
    *("cnn_counterfactuals.pickle.gz", "ddp_sgd_v100_kineto.json.gz", "dtr_resnet32.log.gz", "dtr_transformer.log.gz"),
    *("llama3_8b_fsdp4_oom_rank0.pickle.gz", "llama_offload_10streams.pickle.gz", "lm27b_compiled_fwd.pickle.gz"),
    *(
        "lm27b_ctx128_fullstep.pickle.gz",
        "lm_fb_ctx200.pickle.gz",
        "lm_fwd_ctx200.pickle.gz",
        "lm_step_steady.pickle.gz",
    ),
    *("octree_nca_train.pickle.gz", "qwen05b_h100.json.gz", "resnet18_zdevito.html.gz"),
    *("resnet50_pytorch_blog.pickle.gz", "resnet50_v100_kineto_nw0.json.gz", "resnet_adam_npu_expandable.pickle.gz"),
    *("resnet_timeline_hta.json.gz", "tiny_transformer.pickle.gz"),
)


def page_of(tmp_path: Path, *files: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of the page of some files, and what it knows of each device."""
    page = tmp_path / "report.html"
    assert main(["report", *files, "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    (headers,) = re.findall(r'<script type="application/json" id="headers">(.*?)</script>', text)
    return text, json.loads(headers)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """What a verb says of each device, as JSON."""
    capsys.readouterr()
    assert main([*words, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)["devices"]


@pytest.mark.parametrize("name", each((*QUICK, *OTHERS), always=QUICK))
def test_the_figures_are_those_of_the_other_verbs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = str(path_of(name))
    text, devices = page_of(tmp_path, file)
    of = {verb: told(capsys, verb, file) for verb in ("stats", "explain", "top")}
    assert len(devices) == len(of["stats"])
    for number, device in enumerate(devices):
        stats, explained, top = (of[verb][number] for verb in ("stats", "explain", "top"))
        assert device["summary"]["allocated_peak_bytes"] == stats["allocated_peak_bytes"]
        assert device["summary"]["reserved_peak_bytes"] == stats["reserved_peak_bytes"]
        assert device["summary"]["lower_bound_bytes"] == stats["lower_bound_bytes"]
        assert device["summary"]["fragmentation"] == stats["fragmentation"]
        assert device["explanation"]["causes"] == explained["causes"]
        assert device["explanation"]["event"] == explained["event"]
        assert device["moment"]["event"] == top["event"]
        held = held_at(text, device, number, top["event"] + 1)
        assert held == {entry["name"]: entry["held_bytes"] for entry in top["by_site"]}


def test_every_recording_there_is_is_looked_at(shared_traces: Path) -> None:
    strangers = {name for name in (*QUICK, *OTHERS) if not (OURS / name).exists()}
    assert {file.name for file in shared_traces.glob("*.gz")} == strangers
    assert {file.name for file in (shared_traces / "h100").glob("*.gz")} == {f"{name}.json.gz" for name in PROFILES}


QUICK_PROFILES = ("h100/timesformer", "h100/qwen05b")
PROFILES = ("timesformer", "qwen05b", "bert", "owlv2", "resnet50_train_v100", "vit", "b200_eager")


@pytest.mark.parametrize(
    "name", ["iteration.csv", *each([f"h100/{name}.json.gz" for name in PROFILES], always=QUICK_PROFILES)]
)
def test_the_charts_of_a_profile_have_the_figures_of_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = written(tmp_path, ITERATION) if name == "iteration.csv" else str(path_of(name))
    _, (device,) = page_of(tmp_path, file)
    (study,) = told(capsys, "timeline", file)
    assert device["study"]["findings"] == study["findings"]
    drawn = device["study"]
    assert {"file": file, **drawn["found"], "findings": study["findings"], "series": drawn["series"]} == study
    assert device["has_memory"] == ("qwen05b" in name or "bert" in name)
    for link in study["links"]:
        rates = study["series"]["link_bytes_per_second"][link["link"]]
        assert sum(rates) * study["series"]["stretch_seconds"] == pytest.approx(link["num_bytes"])
    summary = tmp_path / "summary.md"
    assert main(["report", file, "-o", str(summary)]) == 0
    assert "| phase | time | computes | copies | both | idle |" in summary.read_text(encoding="utf-8")


def columns_of(text: str, number: int) -> np.ndarray:
    """The columns of a device, one behind the other."""
    (packed,) = re.findall(rf'<script type="application/octet-stream" id="columns-{number}">(.*?)</script>', text)
    return np.frombuffer(gzip.decompress(base64.b64decode(packed)), "<u4").astype(np.int64)


def held_at(text: str, device: dict[str, Any], number: int, moment: int) -> dict[str, int]:
    """Bytes by call site at a moment, from the columns that the page draws."""
    start, duration, size, _, _, stack = columns_of(text, number)[: 6 * device["num_requests"]].reshape(6, -1)
    live = (start <= moment) & (moment < start + duration)
    held: dict[str, int] = {}
    for one, units in zip(stack[live].tolist(), size[live].tolist(), strict=True):
        name = device["sites"][device["stacks"][one][0]]
        held[name] = held.get(name, 0) + 512 * units
    return held


MODELS = ("expandable", "stalloc")
OTHER_MODELS = ("torch", "cupy", "bfc", "rmm_pool", "rmm_arena", "stream_ordered", "tlsf")


@pytest.mark.parametrize("models", [MODELS, pytest.param(OTHER_MODELS, marks=pytest.mark.slow)])
def test_blocks_of_every_map_lie_inside_segments_and_never_over_one_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], models: tuple[str, ...]
) -> None:
    file = str(path_of("fragmented.pickle.gz"))
    chosen = [word for name in models for word in ("--allocator", name)]
    text, (device,) = page_of(tmp_path, file, *chosen)
    words, count, num_maps = columns_of(text, 0), device["num_requests"], len(models) + 2
    start, duration, size = words[: 3 * count].reshape(3, -1)
    assert [made["name"] for made in device["maps"]] == [
        *("as recorded", *(f"{name} (model)" for name in models), "stalloc's plan, in hindsight")
    ]
    (simulated,) = told(capsys, "simulate", file, *chosen)
    peaks = {f"{result['allocator']} (model)": result["peak_reserved_bytes"] for result in simulated["results"]}
    at, frames = 6 * count, (6 + num_maps) * count
    for made in device["maps"]:
        place, at = words[at : at + count], at + count
        segments, frames = words[frames : frames + 4 * made["segments"]].reshape(-1, 4), frames + 4 * made["segments"]
        begin, end, bottom, top = segments.T
        assert max((place + size).max(), top.max()) <= made["height"]
        most = 0
        for moment in range(1, device["num_events"] + 1, 97):
            live = np.flatnonzero((start <= moment) & (moment < start + duration) & (size > 0))
            order = live[np.argsort(place[live])]
            assert (place[order][1:] >= (place + size)[order][:-1]).all(), made["name"]
            there = (begin <= moment) & (moment < end)
            most = max(most, 512 * int((top - bottom)[there].sum()))
            if "moments" in made["note"] or not len(live):
                continue  # segments are shown as they were some events before
            low, high = (column[there][np.argsort(bottom[there])] for column in (bottom, top))
            ends = high[np.append(low[1:] != high[:-1], True)]  # of what lies side by side
            assert (place[order] >= low[np.searchsorted(low, place[order], side="right") - 1]).all(), made["name"]
            assert (place[order] < ends[-1]).all(), made["name"]
            reach = ends[np.searchsorted(ends, place[order], side="right")]
            assert ((place + size)[order] <= reach).all(), made["name"]
        assert most <= peaks.get(made["name"], most), made["name"]
        assert most >= 0.95 * peaks.get(made["name"], 0), made["name"]


def test_a_model_without_fixed_addresses_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_leak(tmp_path / "leak.pickle")
    for words in (["--allocator", "compacting"], ["--allocator", "nobodys"], ["--conf", "max_split:1"]):
        assert main(["report", file, "-o", str(tmp_path / "out.html"), *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out.html").exists()


def test_a_report_from_code_is_that_of_the_verb(tmp_path: Path) -> None:
    file = write_leak(tmp_path / "leak.pickle", oom=True)
    page = stalloc.report(file, tmp_path / "code.html", allocators=["torch:max_split_size_mb:32"])
    assert main(["report", file, "-o", str(tmp_path / "verb.html"), "--conf", "max_split_size_mb:32"]) == 0
    assert page.read_bytes() == (tmp_path / "verb.html").read_bytes()
    stalloc.report(stalloc.load_traces(file), tmp_path / "summary", format="md")
    assert "grows 32.00 MiB a step" in (tmp_path / "summary").read_text(encoding="utf-8")
    with pytest.raises(stalloc.BadInputError, match=r"ends in \.html"):
        stalloc.report(file, tmp_path / "out.docx")


def test_what_strangers_wrote_is_text_and_never_markup(tmp_path: Path) -> None:
    file = Path(write_leak(tmp_path / "leak.pickle"))
    (tmp_path / "<img src=x>.pickle").write_bytes(file.read_bytes().replace(b"forward", b"for<b>d"))
    text, (device,) = page_of(tmp_path, str(tmp_path / "<img src=x>.pickle"))
    assert "<img" not in text
    assert "for<b>d" not in text
    assert any("for<b>d" in name for name in device["sites"])
    assert text.count("</script") == 3, "what is known, its columns, and the script"


def test_nothing_is_asked_of_a_network(tmp_path: Path) -> None:
    text, _ = page_of(tmp_path, write_leak(tmp_path / "leak.pickle"))
    assert "default-src 'none'" in text
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", text) == []


def test_it_begins_with_what_is_wrong(tmp_path: Path) -> None:
    _, (device,) = page_of(tmp_path, write_leak(tmp_path / "leak.pickle", oom=True))
    assert device["headline"][0].startswith("Out of memory by capacity: ")
    assert any("grows 32.00 MiB a step at leak.py:6 step" in sentence for sentence in device["headline"])


def test_phases_and_where_names_come_from_are_told(tmp_path: Path) -> None:
    """The update that torch annotates is a phase; a recording without stacks has no call sites to choose."""
    _, (steady, without) = page_of(tmp_path, str(path_of("step.pickle.gz")), str(path_of("lifespans.csv.gz")))
    ((begin, end, name),) = steady["phases"]
    assert name == "update"
    assert 0 < begin < end <= steady["num_events"]
    assert steady["sites_are"] == "call site"
    assert (without["sites_are"], without["phases"]) == ("", [])


def test_ranks_stand_beside_each_other(tmp_path: Path) -> None:
    files = [path_of(f"rank{rank}.pickle.gz") for rank in range(2)]
    _, devices = page_of(tmp_path, *map(str, files))
    peaks = [device["summary"]["reserved_peak_bytes"] for device in devices]
    assert sorted(peaks) == sorted(counted(f"rank{rank}")[0]["reserved_peak_bytes"] for rank in range(2))


def test_levels_of_detail_keep_what_can_be_seen() -> None:
    rng = np.random.default_rng(3)
    start = np.sort(rng.integers(-1, 50_000, 20_000))
    end = np.maximum(start, 0) + 1 + (rng.pareto(1.0, 20_000) * 10).astype(int)
    size = rng.integers(0, 1 << 24, 20_000)
    level = detail_levels(start, end, size).astype(int)
    for zoom in range(0, 15, 3):
        long = (end - start) >= 2**zoom
        assert (level[long] >= zoom).all()
        column = np.maximum(start, 0) >> zoom
        shown = (level >= zoom) & ~long
        assert np.bincount(column[shown], minlength=1).max() <= LARGEST_IN_COLUMN
        for one in np.unique(column)[::50]:
            inside = (column == one) & (size > 0)
            largest = np.sort(size[inside])[::-1][:LARGEST_IN_COLUMN].min()
            assert (level[inside & (size > largest)] >= zoom).all()


def test_a_file_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["report", str(tmp_path / "nothing.pickle")]) == 2
    assert "nothing.pickle" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_leak(tmp_path / "leak.pickle")
    assert main(["report", file, "-o", str(tmp_path / "no" / "report.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_markdown_shows_the_figures_and_strangers_text_as_text(tmp_path: Path) -> None:
    file = Path(write_leak(tmp_path / "leak.pickle", oom=True))
    file.write_bytes(file.read_bytes().replace(b"__init__", b"|<b>`xy`"))
    assert main(["report", str(file), "-o", str(tmp_path / "out.md")]) == 0
    text = (tmp_path / "out.md").read_text(encoding="utf-8")
    assert "**Out of memory by capacity: " in text
    assert "32.00 MiB a step at leak.py:6 step" in text
    assert "\\|\\<b\\>\\`xy\\`" in text
    assert "| call site | held | requests |" in text


@pytest.mark.parametrize(
    ("name", "form", "begins"),
    [
        ("fragmented.pickle.gz", "png", b"\x89PNG"),
        ("profile.json.gz", "svg", b"<?xml"),
        ("gpus.pickle.gz", "pdf", b"%PDF"),
    ],
)
def test_pictures_are_drawn_by_matplotlib(tmp_path: Path, name: str, form: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra report)")
    out = tmp_path / f"out.{form}"
    assert main(["report", str(path_of(name)), "--device", "0", "-o", str(out)]) == 0
    assert out.read_bytes().startswith(begins)


def test_without_matplotlib_a_picture_is_one_sentence(run_program: Any, tmp_path: Path) -> None:
    file = write_leak(tmp_path / "leak.pickle")
    hide = "import sys; sys.modules['matplotlib'] = None; from stalloc.cli import main; sys.exit(main(sys.argv[1:]))"
    done = run_program(hide, "report", file, "-o", str(tmp_path / "out.png"))
    assert done.returncode == 2
    assert "pip install 'stalloc[report]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_ending_that_is_none_of_a_report_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", write_leak(tmp_path / "leak.pickle"), "-o", str(tmp_path / "out.docx")]) == 2
    assert ".html, .md, .png, .svg or .pdf" in capsys.readouterr().err


@pytest.mark.usefixtures("cupy_installed")
def test_a_run_is_shown_with_all_that_was_reserved(tmp_path: Path) -> None:
    loop = Path(__file__).parent / "programs" / "cupy_loop.py"
    page, result = tmp_path / "run.html", tmp_path / "run.json"
    words = ("run", "--device", "virtual", "--report", page, "--json", result, loop)
    done = run_stalloc(*words, folder=tmp_path, variables={**os.environ, "STALLOC_CACHE": "off"})
    assert done.returncode == 0, done.stderr
    assert f"wrote {page}" in done.stderr
    (headers,) = re.findall(r'<script type="application/json" id="headers">(.*?)</script>', page.read_text())
    (device,), ran = json.loads(headers), json.loads(result.read_text())
    assert ran["plans_made"] >= 1
    assert device["summary"]["reserved_peak_bytes"] == ran["run_reserved_peak_bytes"]
    assert device["summary"]["allocated_peak_bytes"] == ran["run_allocated_peak_bytes"]
    assert any("cupy_loop.py" in site for site in device["sites"])


@pytest.mark.usefixtures("cupy_installed")
def test_where_the_page_of_a_run_cannot_be_written_is_said_before_the_program_runs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('ran')\n")
    for name, said in (("run.docx", "a report ends in"), ("no/run.html", "no/run.html")):
        words = ("run", "--device", "virtual", "--report", tmp_path / name, program)
        done = run_stalloc(*words, folder=tmp_path, variables=dict(os.environ))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (125, "", 1), done.stderr
        assert said in done.stderr
