"""Every kind of page that stalloc writes: in a browser it asks nothing of a network, and what strangers wrote is text.

The files are hostile: names of files, functions, phases, devices and modules are markup with scripts in it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_report_browser import Page, browser  # noqa: F401 a fixture
from test_timeline import ITERATION, kineto, launched
from test_top import write_leak

import stalloc
from stalloc.cli import main
from stalloc.integrations.notebook import framed

EVIL = '<img src="http://127.0.0.1:9/a" onerror="document.title=1"><script>document.title=2</script>'
NAME = "<script>document.title=3<.pickle"  #: of a file, which has no slashes


def _leak(folder: Path, *, oom: bool = False) -> str:
    source = Path(write_leak(folder / "leak.pickle", oom=oom))
    hostile = folder / NAME
    hostile.write_bytes(source.read_bytes().replace(b"forward", b"x<b>y<b").replace(b"model.py", b"m<i>l.py"))
    return str(hostile)


def _table(folder: Path) -> str:
    rows = [line + "," * (6 - line.count(",")) for line in ITERATION.strip().splitlines()]
    file = folder / (NAME + ".csv")
    file.write_text("\n".join(rows).replace("forward", '"' + EVIL.replace('"', '""') + '"') + "\n")
    return str(file)


def _profile(folder: Path) -> str:
    events = json.loads(kineto([*launched(1, 10, 5, 20, 50), *launched(2, 70, 5, 80, 10)]))
    events["deviceProperties"][0]["name"] = EVIL
    events["traceEvents"].append(
        {"ph": "X", "pid": 10, "tid": 1, "args": {}, "cat": "user_annotation", "name": EVIL, "ts": 0, "dur": 100}
    )
    file = folder / (NAME + ".json")
    file.write_text(json.dumps(events))
    return str(file)


def _one(folder: Path) -> Path:
    assert main(["report", _leak(folder), "-o", str(folder / "page.html")]) == 0
    return folder / "page.html"


def _compared(folder: Path) -> Path:
    (folder / "other").mkdir()
    files = [_leak(folder, oom=True), _leak(folder / "other")]
    assert main(["report", *files, "--allocator", "expandable", "-o", str(folder / "page.html")]) == 0
    return folder / "page.html"


def _study(folder: Path) -> Path:
    assert main(["report", _table(folder), "-o", str(folder / "page.html")]) == 0
    return folder / "page.html"


def _profiled(folder: Path) -> Path:
    return stalloc.report(_profile(folder), folder / "page.html")


def _notebook(folder: Path) -> Path:
    traces = stalloc.load_traces(_leak(folder))
    page = folder / "page.html"
    tables = "".join(shown._repr_html_() for shown in (traces[0], stalloc.plan(traces[0])))
    page.write_text(f"<!doctype html><title>notebook</title><main>{framed(traces)}{tables}</main>", encoding="utf-8")
    return page


KINDS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "report": (_one, ("x<b>y<b", "m<i>l.py")),
    "compared": (_compared, ("x<b>y<b", NAME)),
    "study": (_study, ("<img src=", NAME)),
    "profile": (_profiled, ("device 0: <img src=", NAME)),
    "notebook": (_notebook, ("x<b>y<b", "m<i>l.py")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaves_the_machine_and_nothing_of_a_stranger_runs(
    kind: str,
    browser: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    make, told = KINDS[kind]
    page = make(tmp_path)
    opened = Page(browser, page, frame="iframe" if kind == "notebook" else None)
    title = opened.tab.title()
    for number in range(opened.inside.locator("#devices button").count()):
        opened.inside.locator("#devices button").nth(number).click()
    if opened.inside.locator("#holders").is_visible():
        opened.inside.locator("#holders").select_option("call site")
        opened.inside.locator("#grouping").select_option("call site")
        opened.inside.locator("#search").fill("<b>")
        opened.inside.locator("#maps canvas").first.focus()
        opened.tab.keyboard.press("Enter")
    for wanted in told:
        assert wanted in opened.inside.locator("main").text_content()
    for tag in ("main b", "main i b", "main img", "main script", "main a"):
        assert opened.inside.locator(tag).count() == 0
    assert opened.tab.title() == title
    assert opened.errors == []
    assert [url for url in opened.requests if url != "about:srcdoc"] == [page.as_uri()]
    blocked = opened.inside.locator("body").evaluate(
        "() => new Promise((done) => {"
        " addEventListener('securitypolicyviolation', (event) => done(event.violatedDirective));"
        " fetch('http://127.0.0.1:9/').then(() => done('nothing'), () => 0); })"
    )
    assert blocked == "connect-src", "the page's own policy forbids what its scripts might ask for"
    opened.tab.close()
