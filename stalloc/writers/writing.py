"""Chunks of text to files: the same contents give the same bytes, compressed or not."""

import gzip
import io
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from stalloc.files import whole


def write_chunks(path: Path, chunks: Iterable[bytes]) -> None:
    """Write the chunks one after the other to a file, compressed if its name ends in `.gz`.

    Raises BadInputError if it cannot be written; then what was there before is still there.
    """
    with whole(path) as file:
        if path.name.endswith(".gz"):
            with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed:
                _copy(chunks, packed)
        else:
            _copy(chunks, file)


def _copy(chunks: Iterable[bytes], file: BinaryIO | gzip.GzipFile) -> None:
    buffer = io.BytesIO()
    for chunk in chunks:
        buffer.write(chunk)
        if buffer.tell() > 1 << 20:
            file.write(buffer.getvalue())
            buffer = io.BytesIO()
    file.write(buffer.getvalue())
