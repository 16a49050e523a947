"""`stalloc info`: what it reports, in text and as JSON."""

import json

import pytest

from stalloc.allocator_conf import conf_in_force
from stalloc.cli import main


def test_json_holds_versions_gpus_and_settings(capsys, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", "50%")
    assert main(["info", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"stalloc", "python", "torch", "cupy", "numba", "numpy", "networkx", "triton"} <= set(found["versions"])
    assert found["versions"]["numpy"]
    assert found["settings"]["CUPY_GPU_MEMORY_LIMIT"] == "50%"
    assert found["torch_allocator"] == {"expandable_segments": "True"}
    assert isinstance(found["gpus"], list)
    assert "H100" in found["virtual_gpu"]["known"]


def test_table_of_work_spaces_is_shown_with_its_sources(capsys):
    assert main(["info", "--cudnn-table", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["cudnn_workspaces"]
    assert all(row["source"] for row in rows)
    assert main(["info", "--cudnn-table"]) == 0
    text = capsys.readouterr().out
    assert "vision transformers" in text
    lines = text.splitlines()
    (on_h100,) = [line for line in lines if "profiles of three vision transformers" in line]
    assert "cuDNN 9 or later, architecture 9.0 to below 10.0, 16 bits, channels first, forward" in on_h100
    assert "input + filter + output with channels padded to 8 + 512" in on_h100
    assert any("32x64x56x56 by 64x64x3x3 stride 1x1, cuDNN 8, architecture 8.0, 32 bits" in line for line in lines)
    assert any("1x1, stride 1, several images" in line for line in lines)


def test_text_shows_settings_as_they_are_and_ends_with_the_next_command(capsys, monkeypatch):
    monkeypatch.setenv("STALLOC_EXAMPLE", "[bold]as written[/bold]")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "[bold]as written[/bold]" in text
    assert text.rstrip().splitlines()[-1].startswith("Next: stalloc ")


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, {"max_split_size_mb": "128"}),
        (
            {"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
            {"backend": "native"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2], expandable_segments:True"},
            {"roundup_power2_divisions": "[256:1,512:2]", "expandable_segments": "True"},
        ),
    ],
)
def test_torch_allocator_settings_are_those_that_torch_reads(environment, options):
    assert conf_in_force(environment)[1] == options


def test_info_imports_neither_torch_nor_cupy(run_program):
    done = run_program(
        "import sys; from stalloc.cli.info import collect; collect(); print({'torch', 'cupy'} & set(sys.modules))"
    )
    assert done.stdout.strip() == "set()"
