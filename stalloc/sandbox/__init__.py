"""Programs whose writes leave every file of the user's as it is: on the virtual GPU every value is zero.

`Sandbox` is that of one process; `SandboxedRun` runs a verb's program in one; `ProgramFiles` is for many runs.
"""

from stalloc.sandbox.sandbox import Ended, ProgramFiles, Sandbox, SandboxedRun, end_as_python, leave
from stalloc.sandbox.ways import Way, way
from stalloc.sandbox.written import Files, files_from_json, merged

__all__ = [
    "Ended",
    "Files",
    "ProgramFiles",
    "Sandbox",
    "SandboxedRun",
    "Way",
    "end_as_python",
    "files_from_json",
    "leave",
    "merged",
    "way",
]
