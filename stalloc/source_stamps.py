"""What compiled code of a source file may hold a part of: that file, and all that its imports lead to.

Contract: equal stamps mean equal contents of all of them, wherever the package lies. Followed are imports that begin a
line, of files in the same package, or beside a file that is in none, and of stalloc's own files from anywhere; what is
imported in a function, or for type checkers only, is no part of compiled code (a test compares with Python's own
parser), nor are packages that happen to be installed in the same folder. What makes compiled code is a part of every
stamp.
"""

import hashlib
import re
from functools import cache
from os.path import basename, curdir, dirname, isdir, isfile, join, relpath, sep

_HERE = dirname(__file__)
_MAKERS = [join(_HERE, name) for name in ("compiled.py", "compiler.py")]
_IMPORT = re.compile(rb"^(?:from +([\w.]+) +import +(\([^)]*\)|.*)|import +(.*))", re.MULTILINE)
_NAME = re.compile(rb"[\w.]+")
_is_file, _is_folder = cache(isfile), cache(isdir)  # many files import the same ones


@cache
def stamp_of(source: str) -> str:
    """What changes when a file changes that compiled code of this one may hold a part of."""
    digest = hashlib.sha256()
    for path in sources_of(source):
        digest.update(f"{basename(dirname(path))}/{basename(path)}\n".encode() + _read(path)[0])
    return digest.hexdigest()


def sources_of(source: str) -> list[str]:
    found, rest = {source, *_MAKERS}, [source]
    while rest:
        for path in _read(rest.pop())[1]:
            if path not in found:
                found.add(path)
                rest.append(path)
    return sorted(found, key=lambda path: (basename(dirname(path)), basename(path)))


@cache
def _read(source: str) -> tuple[bytes, list[str]]:
    with open(source, "rb") as file:
        content = file.read()
    imported = []
    for module, names, modules in _IMPORT.findall(content):
        if module:
            imported += _files(source, module.decode(), _NAME.findall(names))
        for name in _NAME.findall(modules):
            imported += _files(source, name.decode(), [])
    return hashlib.sha256(content).digest(), imported


def _files(source: str, module: str, names: list[bytes]) -> list[str]:
    """The files of a module that a file imports, and of those of its names that are modules; none of other packages."""
    place, above = dirname(source), len(module) - len(module.lstrip("."))
    if above == 0:
        top, root = module.partition(".")[0], _root(place)
        if top == basename(_HERE):
            root = dirname(_HERE)
        elif relpath(place, root).partition(sep)[0] not in (curdir, top):
            return []
        place = root
    for _ in range(above - 1):
        place = dirname(place)
    place = join(place, *filter(None, module.split(".")))
    places = [place]
    if _is_folder(place):
        places += [join(place, name.decode()) for name in names]
    return [path for one in places for path in (one + ".py", join(one, "__init__.py")) if _is_file(path)]


@cache
def _root(folder: str) -> str:
    while _is_file(join(folder, "__init__.py")):
        folder = dirname(folder)
    return folder
