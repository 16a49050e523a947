"""`%%stalloc` in a notebook: the cell runs as ever, and the page of its memory is displayed below."""

import html
import importlib.util
import json
import re
from typing import Any

import pytest

if importlib.util.find_spec("IPython") is None:
    pytest.skip("IPython is not installed", allow_module_level=True)

_NOTEBOOK = """
import json, sys
from stalloc.device import activate
activate("virtual")
from IPython.testing.globalipapp import start_ipython
from IPython.utils.capture import capture_output
shell = start_ipython()
shell.run_line_magic("load_ext", "stalloc")
told = []
for cell in json.loads(sys.argv[1]):
    with capture_output() as seen:
        shell.run_cell(cell)
    told.append([seen.stdout, seen.stderr, [output.data.get("text/html", "") for output in seen.outputs]])
print(json.dumps(told))
"""


def cells(run_checks: Any, *sources: str) -> list[tuple[str, str, list[str]]]:
    """What each cell printed, said on standard error, and displayed."""
    return [tuple(told) for told in run_checks(_NOTEBOOK, json.dumps(sources))]


def devices_of(frame: str) -> list[dict[str, Any]]:
    """What a displayed page knows of each device."""
    (page,) = re.findall(r'<iframe sandbox="allow-scripts" srcdoc="(.*?)"', frame, re.DOTALL)
    (headers,) = re.findall(r'<script type="application/json" id="headers">(.*?)</script>', html.unescape(page))
    return json.loads(headers)


@pytest.mark.usefixtures("cuda_torch")
def test_a_cell_runs_and_its_page_is_shown(run_checks: Any) -> None:
    first, shown, failed, quiet = cells(
        run_checks,
        "import torch; kept = torch.zeros(3 << 20, dtype=torch.uint8, device='cuda')",
        "%%stalloc\nx = [torch.zeros(5 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]\nprint(len(x))",
        "%%stalloc\nx = None; y = torch.zeros(7 << 20, dtype=torch.uint8, device='cuda')\nraise ValueError('mine')",
        "%%stalloc\nz = 1",
    )
    assert first == ("", "", [])
    assert shown[0].startswith("4\n")
    (device,) = devices_of(shown[2][0])
    assert device["summary"]["allocated_peak_bytes"] == 23 << 20
    assert "ValueError: mine" in re.sub(r"\x1b\[[0-9;]*m", "", failed[0])
    (device,) = devices_of(failed[2][0])
    assert device["num_requests"] == 6
    assert "no GPU memory" in quiet[1]
    assert quiet[2] == []


@pytest.mark.usefixtures("cupy_installed")
def test_a_cell_of_cupy_under_stalloc_is_shown(run_checks: Any) -> None:
    _, shown = cells(
        run_checks,
        "import stalloc; stalloc.install(); import cupy as cp",
        "%%stalloc\nx = cp.cuda.alloc(6 << 20)",
    )
    (device,) = devices_of(shown[2][0])
    assert device["summary"]["allocated_peak_bytes"] == 6 << 20
