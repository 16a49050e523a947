"""What a script found, as JSON where --json asks for it."""

import json
from dataclasses import asdict
from pathlib import Path


def write_json(file: str | None, found: object) -> None:
    """Write to a file, `-`: standard output, None: nowhere; dataclasses become objects."""
    if file is None:
        return
    text = json.dumps(found, indent=1, default=asdict) + "\n"
    if file == "-":
        print(text, end="")
    else:
        Path(file).write_text(text, encoding="utf-8")
