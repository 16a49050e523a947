"""One report from traces or files of them: the page, a summary in Markdown, or a picture."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from stalloc.cost.step_seconds import as_it_would_run
from stalloc.errors import BadInputError
from stalloc.printable import printable
from stalloc.replay.simulation import Candidate
from stalloc.trace import DeviceRecord, Trace, load_devices, record_of

FORMATS = ("html", "md", "png", "svg", "pdf")

Source = Trace | str | PathLike[str]


def report(
    what: Source | Sequence[Source],
    output: str | PathLike[str] = "report.html",
    *,
    format: str | None = None,
    allocators: Sequence[str] = (),
) -> Path:
    """Show memory: write one page, summary or picture of traces, or of files that stalloc reads; its path.

    `format` is one of FORMATS, where the ending of `output` does not say it. `allocators` are models of which the page
    shows a map beside the recorded addresses, named as for `stalloc simulate --allocator`: "torch",
    "torch:expandable_segments:True". Raises BadInputError for input that cannot be read or shown, and for an output
    that cannot be written; then what was there before is still there.
    """
    sources = [what] if isinstance(what, Trace | str | PathLike) else list(what)
    records: list[tuple[str, DeviceRecord]] = []
    for source in sources:
        found = [record_of(source)] if isinstance(source, Trace) else load_devices(Path(source), history=False)
        name = f"trace of device {source.device}" if isinstance(source, Trace) else str(source)
        records += [(name, as_it_would_run(record)) for record in found]
    path = Path(output)
    write_report(path, format_of(path, format), records, [Candidate.named(text) for text in allocators])
    return path


def format_of(path: Path, format: str | None) -> str:
    """The format of an output. Raises BadInputError where neither its name nor `format` says it."""
    form = format or path.suffix[1:].lower()
    if form not in FORMATS:
        raise BadInputError(
            f"{printable(str(path))}: a report ends in .html, .md, .png, .svg or .pdf; name one, or give --format."
        )
    return form


def write_report(
    path: Path, form: str, records: Sequence[tuple[str, DeviceRecord]], allocators: Sequence[Candidate] = ()
) -> None:
    """Write named devices in one of FORMATS. Raises BadInputError as `report` does."""
    if form == "html":
        from stalloc.writers.page import write_page

        write_page(path, records, allocators)
    elif allocators:
        raise BadInputError("maps of other allocators are for pages: leave the allocators out, or write .html.")
    elif form == "md":
        from stalloc.writers.markdown import write_markdown

        write_markdown(path, records)
    else:
        from stalloc.writers.picture import write_picture

        if len(records) != 1:
            raise BadInputError(f"a picture shows one device, and there are {len(records)}: choose one with --device.")
        write_picture(path, records[0][1], form)
