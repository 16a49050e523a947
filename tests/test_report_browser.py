"""The page of `stalloc report` in a browser: what hands, wheels and keys do, and that nothing is asked of a network.

Needs Playwright's Python package (the dependency group `browser`) and the system's Chromium; skipped without.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from recordings import path_of
from test_timeline import ITERATION
from test_top import write_leak
from warm_programs import run_stalloc

from stalloc.cli import main

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (dependency group browser)")
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "lib"))
from browser import chromium, launch  # noqa: E402

if chromium() is None:
    pytest.skip("there is no Chromium here", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as engine:
        opened = launch(engine)
        yield opened
        opened.close()


class Page:
    """A page that is open, with what it asked for and what went wrong in it."""

    def __init__(self, browser: Any, file: Path, link: str = "", frame: str | None = None, **options: Any) -> None:
        self.tab = browser.new_page(**({"viewport": {"width": 1200, "height": 1600}} | options))
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.tab.goto(file.as_uri() + link)
        self.inside = self.tab
        if frame is None:
            self.tab.wait_for_function("() => window.isReady === true")
            self.tab.wait_for_function("() => location.hash !== ''")
        else:
            self.inside = self.tab.locator(frame).element_handle().content_frame()
            self.inside.wait_for_function("() => window.isReady === true")
        self.maps = self.tab.locator("#maps canvas")

    def link(self, changed_from: str | None = None) -> dict[str, str]:
        """What the address of the page says; once it has changed, if it is to change."""
        if changed_from is not None:
            self.tab.wait_for_function("before => location.hash !== before", arg=changed_from)
        return {name: values[0] for name, values in parse_qs(self.hash()[1:]).items()}

    def hash(self) -> str:
        return str(self.tab.evaluate("location.hash"))

    def span(self) -> tuple[int, int]:
        begin, end = self.link()["view"].split(",")
        return int(begin), int(end)


@pytest.fixture(scope="module")
def leak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    page = folder / "report.html"
    assert main(["report", write_leak(folder / "leak.pickle"), "-o", str(page)]) == 0
    return page


@pytest.fixture
def page(browser: Any, leak: Path) -> Iterator[Page]:
    opened = Page(browser, leak)
    yield opened
    assert opened.errors == []
    assert opened.requests == [leak.as_uri()], "nothing leaves the machine"
    opened.tab.close()


def test_pointing_at_a_block_says_what_it_is(page: Page) -> None:
    box = page.maps.first.bounding_box()
    page.tab.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + box["height"] - 4)
    page.tab.wait_for_function("() => document.getElementById('pointed').textContent.includes('stream 0')")
    said = page.tab.locator("#pointed").text_content()
    assert "MiB, from event" in said
    assert "leak.py" in said or "model.py" in said


def test_wheel_keys_and_reset_move_through_time(page: Page) -> None:
    whole, before = page.span(), page.hash()
    page.maps.first.hover()
    page.tab.mouse.wheel(0, -600)
    page.link(changed_from=before)
    near = page.span()
    assert near[1] - near[0] < whole[1] - whole[0]
    before = page.hash()
    page.maps.first.focus()
    page.tab.keyboard.press("ArrowLeft")
    page.link(changed_from=before)
    assert page.span()[0] < near[0]
    before = page.hash()
    page.tab.keyboard.press("0")
    page.link(changed_from=before)
    assert page.span() == whole


def test_a_click_chooses_a_moment_and_a_second_one_tells_what_grew(page: Page) -> None:
    title, box, before = page.tab.locator("#held-title"), page.maps.first.bounding_box(), page.hash()
    y = box["y"] + box["height"] / 2
    page.tab.mouse.click(box["x"] + box["width"] * 0.3, y)
    page.link(changed_from=before)
    early, before = title.text_content(), page.hash()
    assert early.startswith("Who holds memory after event")
    page.tab.keyboard.down("Shift")
    page.tab.mouse.click(box["x"] + box["width"] * 0.98, y)
    page.tab.keyboard.up("Shift")
    page.link(changed_from=before)
    assert title.text_content().startswith("What grew from after event")
    assert page.tab.locator("#held tr").first.text_content().startswith("leak.py:6 step")
    before = page.hash()
    page.maps.first.focus()
    page.tab.keyboard.press("Escape")
    page.link(changed_from=before)
    assert title.text_content().startswith("Who holds memory")


def test_colours_search_and_theme_are_kept_in_the_link_or_follow_it(page: Page, browser: Any, leak: Path) -> None:
    before = page.hash()
    page.tab.locator("#grouping").select_option("call site")
    page.link(changed_from=before)
    assert "leak.py:6 step" in page.tab.locator("#legend").text_content()
    before = page.hash()
    page.tab.locator("#search").fill("leak.py:6")
    assert page.link(changed_from=before)["search"] == "leak.py:6"
    again = Page(browser, leak, page.hash())
    assert again.link() == page.link()
    assert again.tab.locator("#grouping").input_value() == "call site"
    assert again.tab.locator("#search").input_value() == "leak.py:6"
    again.tab.close()
    look = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    page.tab.locator("#theme").click()
    assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") != look


def test_both_maps_show_the_same_events_and_the_same_block(page: Page) -> None:
    assert page.maps.count() == 2
    box = page.maps.nth(1).bounding_box()
    page.tab.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + box["height"] - 4)
    page.tab.wait_for_function("() => maps[0].hovered !== undefined && maps[0].hovered === maps[1].hovered")


def test_everything_can_be_done_with_keys(page: Page) -> None:
    page.maps.first.focus()
    before = page.hash()
    page.tab.keyboard.press("+")
    page.link(changed_from=before)
    before = page.hash()
    page.tab.keyboard.press("Enter")
    chosen = page.link(changed_from=before)["at"]
    assert "MiB, from event" in page.tab.locator("#pointed").text_content()
    before = page.hash()
    page.tab.keyboard.press("]")
    assert int(page.link(changed_from=before)["at"]) == int(chosen) + 1
    page.tab.keyboard.press("ArrowRight")
    before = page.hash()
    page.tab.keyboard.press("Shift+Enter")
    link = page.link(changed_from=before)
    assert int(link["against"]) == int(chosen) + 1 < int(link["at"])
    assert page.tab.locator("#held-title").text_content().startswith("What grew from after event")
    before = page.hash()
    page.tab.locator("#grouping").focus()
    page.tab.keyboard.press("ArrowDown")
    assert page.link(changed_from=before)["by"] == "call site"
    page.tab.locator("#search").focus()
    page.tab.keyboard.type("model.py")
    page.tab.wait_for_function("() => maps[0].found.size > 0")


def test_nothing_is_wider_than_a_phone(browser: Any, leak: Path) -> None:
    small = Page(browser, leak, viewport={"width": 390, "height": 800})
    assert small.tab.evaluate("document.documentElement.scrollWidth") <= 390
    small.tab.close()


def test_several_devices_are_told_apart_the_worst_first(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    assert main(["report", str(path_of("gpus.pickle.gz")), "-o", str(file)]) == 0
    opened = Page(browser, file)
    buttons = opened.tab.locator("#devices button")
    assert buttons.count() == 3
    assert buttons.first.get_attribute("aria-pressed") == "true"
    assert "out of memory" in buttons.first.text_content()
    before = opened.hash()
    buttons.last.click()
    assert opened.link(changed_from=before)["device"] != parse_qs(before[1:])["device"][0]
    assert opened.errors == []
    opened.tab.close()


def test_charts_of_copies_are_drawn_without_memory_and_at_every_width(browser: Any, tmp_path: Path) -> None:
    """An iteration with copies beside a recording of memory: each shows what it has, and says what it lacks."""
    rows = [line + "," * (6 - line.count(",")) for line in ITERATION.strip().splitlines()]
    table, file = tmp_path / "iteration.csv", tmp_path / "report.html"
    table.write_text("\n".join(rows) + "\n")
    assert main(["report", str(table), write_leak(tmp_path / "leak.pickle"), "-o", str(file)]) == 0
    opened = Page(browser, file)
    assert not opened.tab.locator("#study").is_visible()
    opened.tab.locator("#devices button").last.click()
    opened.tab.wait_for_function("() => !document.getElementById('study').hidden")
    assert not opened.maps.first.is_visible()
    titles = opened.tab.locator("#charts figcaption").all_text_contents()
    assert "Time of each phase" in titles
    assert any(title.startswith("Traffic device to host: 4.00 MiB in 1 copy, link used to 10.0%") for title in titles)
    assert "Headroom of each phase" not in titles
    assert "headroom is not known" in opened.tab.locator("#missing").text_content()
    assert "stood still for 1 copy" in opened.tab.locator("#story").text_content()
    hints = opened.tab.locator("#charts title").all_text_contents()
    assert "backward: copies 40 us, 20.0%" in hints
    opened.tab.set_viewport_size({"width": 390, "height": 800})
    opened.tab.wait_for_function("() => document.querySelector('#charts svg').viewBox.baseVal.width < 390")
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= 390
    opened.tab.locator("#devices button").first.click()
    opened.tab.wait_for_function("() => document.getElementById('study').hidden")
    assert opened.maps.first.is_visible()
    assert opened.errors == []
    opened.tab.close()


@pytest.mark.usefixtures("cuda_torch")
def test_colours_by_module_follow_the_recorded_operations(browser: Any, tmp_path: Path) -> None:
    trace, file = tmp_path / "ops.trace.npz", tmp_path / "report.html"
    program = Path(__file__).parent / "programs" / "operations.py"
    command = ["record", "--ops", "--device", "virtual", "-o", str(trace), str(program)]
    done = run_stalloc(*command)
    assert done.returncode == 0, done.stderr
    assert main(["report", str(trace), "-o", str(file)]) == 0
    opened = Page(browser, file)
    before = opened.hash()
    opened.tab.locator("#grouping").select_option("module")
    assert opened.link(changed_from=before)["by"] == "module"
    assert "layers.*.up" in opened.tab.locator("#legend").text_content()
    opened.tab.locator("#holders").select_option("role")
    assert "parameter" in opened.tab.locator("#held").text_content()
    assert Page(browser, file, opened.hash()).tab.locator("#grouping").input_value() == "module"
    assert opened.errors == []
    opened.tab.close()
