"""`stalloc mcp`: what the mcp package's own client gets from the server over standard input and output."""

import asyncio
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_stalloc

has_mcp = importlib.util.find_spec("mcp") is not None
needs_mcp = pytest.mark.skipif(not has_mcp, reason="the mcp package is not installed")
needs_virtual_gpu = pytest.mark.usefixtures("cupy_installed", "cuda_torch")
RECORDINGS = Path(__file__).parent / "recordings"
OUT_OF_MEMORY = "out_of_memory.pickle.gz"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder that is allowed, with two recordings and a program, beside one that is not."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in (OUT_OF_MEMORY, "out_of_memory.log"):
        shutil.copy(RECORDINGS / name, folder)
    shutil.copy(RECORDINGS / OUT_OF_MEMORY, tmp_path / "private.pickle.gz")
    (folder / "link.pickle.gz").symlink_to(tmp_path / "private.pickle.gz")
    (folder / "up").symlink_to(tmp_path)
    (folder / "train.py").write_text(
        "import sys, torch\nblock = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device='cuda')\n"
        "model = torch.nn.Linear(8, 8, device='cuda')\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(3):\n"
        "    model(torch.ones(8, 8, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "open('made.txt', 'w').write('zeros')\n"
    )
    return folder


def asked(folder: Path, *questions: tuple[str, dict[str, Any]], options: Sequence[str] = ()) -> list[tuple[bool, Any]]:
    """For each question whether it failed, and the answer: a sentence, or what the tool's schema promises."""
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters

    async def ask() -> list[tuple[bool, Any]]:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-P", "-m", "stalloc", "mcp", "--allow", str(folder), *options],
            env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        async with Client(server) as client:
            answers = []
            for tool, arguments in questions:
                result = await client.call_tool(tool, arguments)
                failed = bool(result.is_error)
                answers.append((failed, result.content[0].text if failed else result.structured_content))
            return answers

    return asyncio.run(ask())


@pytest.mark.skipif(has_mcp, reason="the mcp package is installed")
def test_what_is_missing_is_said_without_the_package(tmp_path: Path) -> None:
    done = run_stalloc("mcp", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "stalloc: `stalloc mcp` needs the mcp package, 2 or later: pip install stalloc[mcp].\n"


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run_stalloc("mcp", "--allow", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "which is no folder" in done.stderr


@needs_mcp
def test_answers_are_the_json_of_the_verbs_with_a_sentence(project: Path) -> None:
    answers = asked(
        project,
        ("explain", {"file": OUT_OF_MEMORY}),
        ("explain", {"file": str(project / "out_of_memory.log")}),
        ("stats", {"file": OUT_OF_MEMORY}),
        ("top", {"file": OUT_OF_MEMORY, "most": 3}),
        ("simulate", {"file": OUT_OF_MEMORY}),
        ("simulate", {"file": OUT_OF_MEMORY, "advise": True}),
        ("policies", {}),
    )
    assert not any(failed for failed, _ in answers), answers
    explained, logged, stats, top, simulated, advised, policies = (answer for _, answer in answers)
    assert explained["sentence"].startswith("Device 0: 352.00 MiB could not be allocated (fragmentation) with 3.42 GiB")
    assert logged["sentence"] == "The error asks for 352.00 MiB: fragmentation."
    assert stats["sentence"] == "Device 0: 1,844 requests, at the peak 3.42 GiB allocated, 3.72 GiB reserved."
    assert len(top["result"]["devices"][0]["by_site"]) == 3
    assert top["left_out"]["devices.0.by_site"] == 14
    assert simulated["sentence"].startswith("Device 0: stalloc mode:plan reserves least")
    assert advised["sentence"] == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert "published systems" in policies["sentence"]
    done = run_stalloc("stats", "--json", "-", project / OUT_OF_MEMORY)
    assert stats["result"] == json.loads(done.stdout)


@needs_mcp
def test_files_outside_the_folders_are_refused_whatever_they_are_called(project: Path) -> None:
    outside = str(project.parent / "private.pickle.gz")
    names = [outside, "../private.pickle.gz", "link.pickle.gz", "up/private.pickle.gz", "/etc/passwd", "../nowhere"]
    tools = ("explain", "stats", "top", "simulate")
    questions = [(tools[at % 4], {"file": name}) for at, name in enumerate(names)]
    for failed, said in asked(project, *questions, ("estimate", {"model": outside})):
        assert failed
        assert "is not in the folders that this server may read" in said


@needs_mcp
def test_no_value_of_an_agent_is_an_option(project: Path) -> None:
    written = project / "written.json"
    answers = asked(
        project,
        ("top", {"file": OUT_OF_MEMORY, "at": f"--json={written}"}),
        ("stats", {"file": f"--json={written}"}),
        ("stats", {"file": "-"}),
        ("stats", {"file": "."}),
        ("stats", {"file": "out_of_memory.log"}),
    )
    assert all(failed for failed, _ in answers)
    assert "there is no file" in answers[1][1]
    assert not written.exists()


@needs_mcp
def test_programs_are_run_only_where_the_user_allowed_it(project: Path) -> None:
    questions = [
        ("dryrun", {"script": "train.py", "arguments": ["8"]}),
        ("fit", {"script": "train.py", "arguments": ["8"], "budget": "1GiB"}),
    ]
    for failed, said in asked(project, *questions):
        assert failed
        assert "--allow-run" in said


@needs_mcp
@needs_virtual_gpu
@pytest.mark.slow
def test_a_program_that_may_be_run_is_and_leaves_no_file(project: Path) -> None:
    before = sorted(project.iterdir())
    questions = [
        ("dryrun", {"script": "train.py", "arguments": ["300"], "memory": "1GiB"}),
        ("dryrun", {"script": "train.py", "arguments": ["300"], "memory": "768MiB"}),
        ("fit", {"script": "train.py", "arguments": ["300"], "budget": "1GiB"}),
        ("dryrun", {"script": "../train.py", "arguments": []}),
    ]
    (ran, fits), (_, tight), (_, fitted), (refused, _) = asked(project, *questions, options=["--allow-run"])
    assert not ran, fits
    assert fits["result"]["stalloc"]["fits"]
    assert not tight["result"]["stalloc"]["fits"]
    assert "stalloc does not fit" in tight["sentence"]
    assert fitted["sentence"].startswith("The cheapest way that fits 1.00 GiB is ")
    assert refused
    assert sorted(project.iterdir()) == before
