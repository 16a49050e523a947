"""Files on other machines, by any scheme that fsspec knows: s3://, gs://, https:// and others.

Contract: fsspec is imported only where a name has a scheme, and is asked for nothing but what the name says.
"""

import re
from collections.abc import Callable
from typing import BinaryIO, TypeVar

from stalloc.errors import BadInputError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_Result = TypeVar("_Result")


def is_remote(name: str) -> bool:
    return _SCHEME.match(name) is not None


def read_remote(name: str, read: Callable[[BinaryIO], bytes]) -> bytes:
    """What `read` makes of the open file. Raises BadInputError saying what is missing, or why it cannot be read."""

    def ask() -> bytes:
        import fsspec

        with fsspec.open(name, "rb") as file:
            return read(file)

    return _asked(name, ask)


def matching(pattern: str) -> list[str]:
    """The names that match a pattern with a scheme, in no order."""

    def match() -> list[str]:
        import fsspec

        files, path = fsspec.core.url_to_fs(pattern)
        return [files.unstrip_protocol(found) for found in files.glob(path)]

    return _asked(pattern, match)


def _asked(name: str, question: Callable[[], _Result]) -> _Result:
    try:
        return question()
    except BadInputError:
        raise
    except ImportError as error:
        raise BadInputError(
            f"{name} needs a package that is not installed ({error}): pip install 'stalloc[remote]', and what its "
            "scheme needs, such as s3fs for s3:// and gcsfs for gs://."
        ) from error
    except FileNotFoundError as error:
        raise BadInputError(f"{name} does not exist: check the name.") from error
    except Exception as error:  # whatever a driver of another project raises
        said = (str(error).strip().splitlines() or [""])[0][:200]
        raise BadInputError(
            f"cannot read {name}: {type(error).__name__}: {said}: check the name and your rights."
        ) from error
