"""scripts/bench/changed: copies of the checkout with something changed in them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stalloc

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

from changed import Change, ChangeError, Checkout  # noqa: E402

NEWER = Change(name="newer", file="stalloc/__init__.py", old='__version__ = "', new='__version__ = "9.')


@pytest.fixture(scope="module")
def base() -> Iterator[Checkout]:
    """A copy of the checkout."""
    with Checkout.copied() as base:
        yield base


def test_a_copy_has_the_change_and_nothing_else_has(base: Checkout) -> None:
    with base.changed(NEWER) as copy:
        done = copy.run("-c", "import stalloc; print(stalloc.__file__, stalloc.__version__)", capture_output=True)
        assert done.stdout == f"{copy.root}/.venv-source/stalloc/__init__.py 9.{stalloc.__version__}\n"
    assert not copy.root.exists()
    for root in (ROOT, base.root):
        assert f'"{stalloc.__version__}"' in (root / NEWER.file).read_text()


@pytest.mark.parametrize(("file", "is_shared"), [("runtime/__init__", True), ("core/heap", False)])
def test_compiled_code_is_shared_where_the_change_is_no_part_of_it(base: Checkout, file: str, is_shared: bool) -> None:
    def stamp(checkout: Checkout) -> str:
        code = (
            "import stalloc, stalloc.source_stamps as it; print(it.stamp_of(stalloc.__path__[0] + '/core/requests.py'))"
        )
        return checkout.run("-c", code, capture_output=True, check=True).stdout

    file = f"stalloc/{file}.py"
    first = (ROOT / file).read_text().partition("\n")[0]
    with base.changed(Change(name="said", file=file, old=first, new=f"\n{first}")) as copy:
        assert (stamp(copy) == stamp(base)) == is_shared


@pytest.mark.parametrize(("old", "said"), [("no such text", "is not there"), ("class ", r"is there \d+ times")])
def test_a_change_that_does_not_fit_says_so(base: Checkout, old: str, said: str) -> None:
    with pytest.raises(ChangeError, match=rf"^lost: the text to change in stalloc/errors.py {said}: name what"):
        base.check(Change(name="lost", file="stalloc/errors.py", old=old, new=""))
