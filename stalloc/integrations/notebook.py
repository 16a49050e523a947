"""`%load_ext stalloc`, then `%%stalloc` at the top of a cell: runs it, and shows the page of its memory below.

Contract: the cell runs as any cell, with what it prints and raises; memory is recorded under the allocators that the
notebook uses, stalloc's or the libraries' own. The page is in a frame of its own, which may run its own scripts only.
"""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stalloc.integrations.native_history import NativeHistory
from stalloc.notices import say

if TYPE_CHECKING:
    from stalloc.trace import Trace

_HEIGHT = 1000  # pixels of the frame


def load_ipython_extension(shell: Any) -> None:
    """Make the magic known; IPython calls this for `%load_ext stalloc`."""

    def show(line: str, cell: str) -> None:
        """Run the cell and show what it did with GPU memory."""
        history = NativeHistory()
        history.begin()
        try:
            shell.run_cell(cell)
            traces = history.traces("this cell")
        finally:
            history.end()
        if not traces:
            say("the cell allocated no GPU memory, so there is nothing to show.")
            return
        from IPython.display import display

        display({"text/html": framed(traces), "text/plain": "\n".join(map(repr, traces))}, raw=True)

    shell.register_magic_function(show, magic_kind="cell", magic_name="stalloc")


def framed(traces: "Sequence[Trace]") -> str:
    """The page of a cell's traces as HTML for a notebook. Raises BadInputError for a trace that cannot be explained."""
    from stalloc.trace import record_of
    from stalloc.writers.page import page_text

    page = html.escape(page_text([("this cell", record_of(trace)) for trace in traces]))
    return f'<iframe sandbox="allow-scripts" srcdoc="{page}" style="width:100%;height:{_HEIGHT}px;border:0"></iframe>'
