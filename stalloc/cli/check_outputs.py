"""What CI systems read of `stalloc diff --check`: a JUnit report, and annotations of GitHub.

Contract: names and texts come from files of strangers; they are escaped as each format wants it.
"""

import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from stalloc.files import write_whole
from stalloc.guard.judgement import Finding
from stalloc.guard.measured import Measured
from stalloc.printable import printable
from stalloc.trace import Trace
from stalloc.trace.sites import Frame, read_sites, site_name, user_frames


def write_junit(file: str, judged: Sequence[tuple[Measured, Finding | None]]) -> None:
    """Write one test case an entry. Raises BadInputError if it cannot be written."""
    failures = sum(finding is not None for _, finding in judged)
    suite = ET.Element("testsuite", name="stalloc", tests=str(len(judged)), failures=str(failures), errors="0")
    for measured, finding in judged:
        case = ET.SubElement(suite, "testcase", classname="stalloc.check", name=printable(measured.name), time="0")
        properties = ET.SubElement(case, "properties")
        for name in ("allocated_peak_bytes", "reserved_peak_bytes"):
            value = getattr(measured.use, name)
            if value is not None:
                ET.SubElement(properties, "property", name=name, value=str(value))
        if finding is not None:
            ET.SubElement(case, "failure", message=finding.headline).text = finding.text(measured)
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    write_whole(file, ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n", "name another for --junit")


def annotation(trace: Trace, measured: Measured, finding: Finding) -> str:
    """The workflow command that shows a failure at the line that it is about."""
    place = _place(trace, finding.sites)
    where = "" if place is None else f"file={_property(place[0])},line={place[1]},"
    title = _property(f"GPU memory of {measured.name}")
    return f"::error {where}title={title}::{_escaped(finding.text(measured))}"


def _place(trace: Trace, names: Sequence[str]) -> tuple[str, int] | None:
    """The file, as seen from here, and the line of the first call site that is known by more than its name."""
    sites = read_sites(trace)
    if sites is None:
        return None
    frames: dict[str, Frame] = {}
    for number in range(sites.num_stacks):
        for frame in user_frames(sites.stack(number))[:1]:
            frames.setdefault(site_name([frame]), frame)
    found = next((frames[name] for name in names if name in frames), None)
    if found is None or not found.line:
        return None
    here = os.getcwd() + os.sep
    return found.filename.removeprefix(here), found.line


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(printable(text, 200)).replace(":", "%3A").replace(",", "%2C")
