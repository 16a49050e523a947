"""HTML pages of torch.cuda._memory_viz: the data inside the page, read as data; no script of it runs.

Pages of today carry a whole snapshot as base64, which is read as any other snapshot. Pages of 2022 carry a list of
elements instead: the first mention of one allocates it, the next frees it. Those have no addresses, streams or times.
"""

import base64
import binascii
import json
import re
from array import array
from pathlib import Path

from stalloc.errors import BadInputError
from stalloc.trace.record import Action, Trace
from stalloc.trace.sources.events import MAX_SIZE_BYTES, make_trace, whole_number
from stalloc.trace.sources.torch_snapshot import read_torch_snapshot

_SOURCE = "memory_viz page"
_SNAPSHOT = re.compile(rb'"base64"\s*:\s*"([^"]*)"')
_ELEMENTS = re.compile(rb"\balloc_data\s*=\s*(?=\{)")
_MAX_ELEMENTS_BYTES = 16 << 20  # decoding takes some twenty times as much
_AGAIN = "save the page again, or give the snapshot pickle that it was made from"


def read_viz_page(path: Path, data: bytes) -> list[Trace]:
    """The traces of a page.

    Raises BadInputError when it holds no snapshot, or one that is damaged, and what read_torch_snapshot raises.
    """
    snapshots = _SNAPSHOT.findall(data)
    if len(snapshots) > 1:
        raise BadInputError(f"{path}: the page holds {len(snapshots)} snapshots: save them as pages of their own.")
    if snapshots:
        try:
            pickled = base64.b64decode(snapshots[0], validate=True)
        except binascii.Error as error:
            raise BadInputError(f"{path}: the snapshot in the page is damaged ({error}): {_AGAIN}.") from error
        traces = read_torch_snapshot(path, pickled)
        return [trace.replace(info=trace.info | {"source": _SOURCE}) for trace in traces]
    if found := _ELEMENTS.search(data):
        return [_read_elements(path, data[found.end() :])]
    raise BadInputError(
        f"{path}: the HTML page holds no snapshot data, only a page of torch.cuda._memory_viz does: {_AGAIN}."
    )


def _read_elements(path: Path, text: bytes) -> Trace:
    if len(text) > _MAX_ELEMENTS_BYTES:
        raise BadInputError(f"{path}: the page holds more than {_MAX_ELEMENTS_BYTES >> 20} MiB: {_AGAIN}.")
    try:
        content, _ = json.JSONDecoder().raw_decode(text.decode())
        actions, sizes = content["actions"], content["elements_size"]
        initial = content.get("initially_allocated") or []
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInputError(f"{path}: the data in the page is damaged or cut short: {_AGAIN}.") from error
    if not all(isinstance(column, list) for column in (actions, sizes, initial)):
        raise BadInputError(f"{path}: the data in the page has no lists of actions and sizes: {_AGAIN}.")
    for number, size in enumerate(sizes):
        whole_number(size, 0, MAX_SIZE_BYTES, f"{path}: element {number}", "size")
    for name, column in (("actions", actions), ("initially_allocated", initial)):
        for number, element in enumerate(column):
            whole_number(element, 0, len(sizes) - 1, f"{path}: entry {number} of {name}", "element")
    live, action = set(initial), array("b")
    for element in actions:
        action.append(Action.FREE_COMPLETED if element in live else Action.ALLOC)
        live ^= {element}
    return make_trace(
        path,
        _SOURCE,
        action=action,
        identity=actions,
        size=[sizes[element] for element in actions],
        baseline=[(element, sizes[element]) for element in dict.fromkeys(initial)],
        notes=["addresses, streams and the device are not in the page"],
    )
