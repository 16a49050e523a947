"""The line that makes `STALLOC=1` work: a file of Python's path configuration, beside the packages.

    python -m stalloc.integrations.hook            puts it in place for this Python
    python -m stalloc.integrations.hook --remove   takes it away

Contract: Python runs the line at every start; while STALLOC is unset, empty or 0 it looks at one variable and loads
nothing, and under `python -I` or `-E` not even that. It raises nothing, even if stalloc is gone. Installing stalloc
puts the file in place; this command is for environments where it was not installed so.
"""

import sys
import sysconfig
from pathlib import Path

from stalloc.errors import SetupError
from stalloc.files import write_whole
from stalloc.integrations.build_backend import FILE_NAME, LINE
from stalloc.notices import say
from stalloc.printable import MAX_SENTENCE, printable


def place(folder: Path | None = None) -> Path:
    """Write the file in this Python's folder of packages, or in `folder`. Raises SetupError if it cannot be written."""
    file = (folder or Path(sysconfig.get_path("purelib"))) / FILE_NAME
    write_whole(file, LINE, "use an environment of your own (venv)", error=SetupError)
    return file


def remove(folder: Path | None = None) -> Path:
    """Remove the file; nothing happens if it is not there. Raises SetupError if it cannot be removed."""
    file = (folder or Path(sysconfig.get_path("purelib"))) / FILE_NAME
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise SetupError(f"cannot remove {file}: {error.strerror}: ask who installed it.") from error
    return file


def main() -> int:
    if sys.argv[1:] not in ([], ["--remove"]):
        say("give no argument, or --remove.")
        return 2
    try:
        file = remove() if sys.argv[1:] else place()
    except SetupError as error:
        say(str(error))
        return 2
    print(f"{'removed' if sys.argv[1:] else 'wrote'} {printable(str(file), MAX_SENTENCE)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
