"""docs/architecture.md: the folders are those that there are, and imports point the way the page says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = re.findall(r"^\| `(?:stalloc/)?(\w+)/` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
BELOW_ALL = ("device", "kernels")  #: the last rows


def imported(folder: str) -> set[str]:
    """The folders of stalloc that modules of a folder import from."""
    base = ROOT / folder if folder == "kernels" else ROOT / "stalloc" / folder
    found = set()
    for path in base.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "stalloc":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stalloc."):
                found.add(node.module.split(".")[1])
    return found & set(FOLDERS)


def test_every_folder_is_on_the_page():
    there = {path.parent.name for path in (ROOT / "stalloc").glob("*/__init__.py")} | {"kernels"}
    assert sorted(FOLDERS) == sorted(there)
    assert tuple(FOLDERS[-2:]) == BELOW_ALL


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_to_rows_above_or_to_the_last_two(folder):
    allowed = {folder, *BELOW_ALL}
    if folder not in BELOW_ALL:
        allowed |= set(FOLDERS[: FOLDERS.index(folder)])
    assert imported(folder) <= allowed
