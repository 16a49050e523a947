"""Pages of the site that are made from what is there already: README, changes, the commands' help, docstrings, sources.

A hook of MkDocs (mkdocs.yml). A link to a file of the checkout that is no page becomes a link to a page that shows it.
"""

import importlib
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
#: files that stand beside docs/, by the name of their page
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
#: sub-packages whose public names the Python reference has, beside those of stalloc itself
PACKAGES = ("trace", "planner", "analysis", "replay", "compaction", "techniques", "fitting", "device")
_LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    made = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in PAGES.items()}
    made |= {"commands.md": commands(), "python.md": python_reference()}
    origins = {page: name for name, page in PAGES.items()}
    texts = [(origins[page], text) for page, text in made.items() if page in origins]
    texts += [
        (f"docs/{file.src_uri}", Path(file.abs_src_path).read_text(encoding="utf-8"))
        for file in files.documentation_pages()
        if file.abs_src_path
    ]
    for origin, text in texts:
        for match in _LINK.finditer(text):
            target = _target(origin, match[2])
            if (page := _page_of(target)).startswith("source/"):
                made[page] = (
                    f"# {target}\n\n```{'python' if target.endswith('.py') else 'text'}\n{_source(target)}```\n"
                )
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    own = page.file.src_uri
    origin = next((name for name, made in PAGES.items() if made == own), f"docs/{own}")
    if own.startswith("source/") or own in ("commands.md", "python.md"):
        return markdown
    folder = str(PurePosixPath(own).parent)

    def linked(match: re.Match[str]) -> str:
        target = _page_of(_target(origin, match[2]))
        return f"{match[1]}{os.path.relpath(target, folder)}{match[3] or ''}{match[4]}"

    return _LINK.sub(linked, markdown)


def _target(origin: str, link: str) -> str:
    """What a link in a file leads to, from the root of the checkout."""
    return os.path.normpath(PurePosixPath(origin).parent / link)


def _page_of(target: str) -> str:
    """The page, or the file of the site, that stands for a file of the checkout."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"source/{target}.md"


def _source(target: str) -> str:
    return (ROOT / target).read_text(encoding="utf-8")


def commands() -> str:
    from stalloc.cli import VERBS, build_parser

    os.environ["COLUMNS"] = "100"
    parts = ["# Commands", "", "What `stalloc VERB --help` prints.", ""]
    for verb in VERBS:
        parser = build_parser(verb)
        choices = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
        parts += [f"## stalloc {verb}", "", "```text", choices[verb].format_help().rstrip(), "```", ""]
    return "\n".join(parts)


def python_reference() -> str:
    """Where mkdocstrings puts the docstrings of all public functions and classes."""
    import stalloc

    parts = ["# Python", "", "What is imported from `stalloc` is loaded when it is first used. Sizes are bytes.", ""]
    known: set[str] = set()
    for module in (stalloc, *(importlib.import_module(f"stalloc.{package}") for package in PACKAGES)):
        found = [getattr(module, name) for name in module.__all__]
        found.sort(key=lambda one: isinstance(one, type) and issubclass(one, Exception))  # errors last
        places = [f"{one.__module__}.{one.__qualname__}" for one in found if hasattr(one, "__qualname__")]
        parts += [f"## {module.__name__}", ""]
        parts += [line for place in places if place not in known for line in (f"::: {place}", "")]
        known |= set(places)
    return "\n".join(parts)
