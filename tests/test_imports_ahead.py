"""Libraries that a program imports first: which are noted, and what importing them ahead leaves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from warm_programs import run_warm

PACKAGE = {
    "plain.py": "import plain_part\nLOADED = True\n",
    "plain_part.py": "",
    "late.py": "",
    "writes.py": "open('kept.txt', 'w').close()\n",
    "threads.py": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    "reads_variable.py": "import os\nSEEN = os.environ.get('OF_THE_PROGRAM')\n",
    "counts.py": "import torch\nNUM = torch.cuda.device_count() if torch.cuda.is_available() else 0\n",
    "wants_cached.py": "import os\nopen(os.devnull, 'w').close()\n",
}
OWN = {
    "own_names.py": "import late\nclass Own: pass\n",
    "own_acts.py": "import plain\nplain.LOADED = False\n",
}
WATCH = """
import json, runpy, sys
from stalloc.fitting.imports_ahead import ImportWatch
watch = ImportWatch()
runpy.run_path(sys.argv[1], run_name='__main__')
watch.end()
print(json.dumps(watch.groups))
"""
COUNTS = """
import json, os, runpy, sys
sys.path.append(sys.argv[1])
from stalloc import device
from stalloc.device.known_gpus import DEFAULT_GPU
device.activate("virtual", DEFAULT_GPU)
import torch
from stalloc.fitting.imports_ahead import ImportWatch, import_ahead

def in_child(do):
    number = os.fork()
    if not number:
        code = 1
        try:
            do()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(number, 0)[1] == 0

def look():
    watch = ImportWatch()
    runpy.run_path('program.py', run_name='__main__')
    open('groups.json', 'w').write(json.dumps(watch.groups))

in_child(look)
import_ahead(json.load(open('groups.json')))
in_child(lambda: torch.ones(3, device='cuda'))
print(json.dumps(sys.modules['counts'].NUM))
"""
AHEAD = """
import json, os, sys
from stalloc.fitting.imports_ahead import import_ahead
import_ahead(json.loads(sys.argv[1]))
print(json.dumps([sorted(set(sys.modules) & set(json.loads(sys.argv[2]))), os.environ.get('OF_THE_PROGRAM')]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    for where, files in ((packages, PACKAGE), (tmp_path, OWN)):
        for name, text in files.items():
            (where / name).write_text(text)
    return tmp_path


def run(folder: Path, source: str, *arguments: str) -> object:
    path = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder / 'site-packages')!r}]\n"
    command = [sys.executable, "-c", path + source, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("program", "ahead"),
    [
        ("import plain\nfrom late import __name__\n", ["plain_part", "plain", "late"]),
        ("'''Trains.'''\nimport plain\nNUM = 3\ndef f(): pass\nimport late\n", ["plain_part", "plain", "late"]),
        (
            "try:\n    import late\nexcept ImportError:\n    late = None\nimport plain\n",
            ["late", "plain_part", "plain"],
        ),
        ("import warnings\nwarnings.simplefilter('ignore')\nimport late\n", ["late"]),
        ("import os\nos.environ['OF_THE_PROGRAM'] = 'yes'\nimport reads_variable\n", ["reads_variable"]),
        ("import own_names\nimport plain\n", ["late", "plain_part", "plain"]),
        ("import wants_cached\n", ["wants_cached"]),
        ("import own_acts\nimport late\n", ["plain_part", "plain"]),  # it may have changed what another reads
        ("import plain\nplain.LOADED = 2\nimport late\n", ["plain_part", "plain"]),
        ("import sys\nsys.modules['plain_part'] = sys\nimport plain\n", []),
        ("import plain\ndef main():\n    import late\nmain()\n", ["plain_part", "plain"]),
        ("import late\nimport writes\nimport plain\n", ["late"]),
        ("import late\nimport threads\nimport plain\n", ["late"]),
    ],
)
def test_what_the_heads_of_files_import_is_noted(folder: Path, program: str, ahead: list[str]) -> None:
    (folder / "program.py").write_text(program)
    groups = run(folder, WATCH, "program.py")
    assert isinstance(groups, list)
    named = {Path(name).stem for name in PACKAGE}
    assert [name for group in groups for name, _ in group["modules"] if name in named] == ahead


def test_what_was_noted_is_imported_with_the_variables_of_the_program(folder: Path) -> None:
    (folder / "program.py").write_text("import os\nos.environ['OF_THE_PROGRAM'] = 'yes'\nimport plain\n")
    groups = json.dumps(run(folder, WATCH, "program.py"))
    asked = json.dumps(["plain", "plain_part"])
    assert run(folder, AHEAD, groups, asked) == [["plain", "plain_part"], "yes"]
    (folder / "plain.py").write_text("")  # another lies before it on the path
    assert run(folder, AHEAD, groups, asked) == [["plain_part"], "yes"]


@pytest.mark.usefixtures("cuda_torch")
def test_libraries_that_count_gpus_leave_them_to_the_trials(folder: Path) -> None:
    (folder / "program.py").write_text("import counts\n")
    done = run_warm(COUNTS, str(folder / "site-packages"), folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1"
