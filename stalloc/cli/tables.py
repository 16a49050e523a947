"""Tables of figures that fit where they are read: a number is never cut, whatever the width.

Contract: every cell is printed whole. Where a terminal is too narrow for all columns, each row becomes a few lines,
its name first and then `label figure` pairs, broken between pairs. Off a terminal rows are as long as they need to be.
"""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from stalloc.cli.output import file_label, note_texts
from stalloc.printable import MAX_SENTENCE, printable

_GAP = "  "
_MIN_PROSE = 24  # columns that prose gets at least, beside what stands before it
_UNITS = ("GiB", "MiB", "B", "bytes", "%", "ms", "s")


def print_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1, indent: str = ""
) -> None:
    """Print rows under their columns' names, without empty columns; the first `text_columns` are words."""
    shown = [[printable(cell, MAX_SENTENCE) for cell in row] for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i].strip(" -") for row in shown) or (i == 0 and shown)]
    names, cells = [columns[i] for i in kept], [[row[i] for i in kept] for row in shown]
    num_words = sum(i < text_columns for i in kept)
    widths = [max(map(cell_len, column)) for column in zip(names, *cells, strict=True)]
    if len(indent) + sum(widths) + len(_GAP) * (len(widths) - 1) <= console.width or not console.is_terminal:
        lines = [_line(row, widths, num_words) for row in (names, *cells)]
        if any(names):
            console.print(Text(indent + lines[0].rstrip(), "bold"))
        for line in lines[1:]:
            console.print(Text(indent + line.rstrip()))
        return
    for row in cells:
        console.print(Text(indent + _GAP.join(cell for cell in row[:num_words] if cell), "bold"))
        named = zip(names[num_words:], row[num_words:], strict=True)
        pairs = [f"{name} {cell}".strip() for name, cell in named if cell]
        if pairs:
            margin = indent + _GAP
            _fill(console, Text(margin), [*(Text(f"{pair},") for pair in pairs[:-1]), Text(pairs[-1])], len(margin))


def print_prose(console: Console, text: str | Text, *, indent: str = "", lead: str | Text = "") -> None:
    """Print a sentence; on a terminal it is broken between words, and goes on under its own beginning.

    A figure and its unit stay together. What `lead` says stands before it, as it is.
    """
    styled = text if isinstance(text, Text) else Text(text)
    line = Text(indent).append_text(lead if isinstance(lead, Text) else Text(lead))
    if not console.is_terminal:
        console.print(line.append_text(styled))
        return
    margin = cell_len(line.plain)
    if console.width - margin < _MIN_PROSE:
        margin = min(margin, len(indent) + len(_GAP))
    _fill(console, line, [word for word in _words(styled) if word.plain], margin)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        print_prose(console, line, indent="  ")


def print_title(console: Console, file: str, story: str) -> None:
    """Print the name of a file, and what follows it in the first line of its report."""
    print_prose(console, Text.assemble((file_label(file), "bold"), story))


def print_notes(console: Console, notes: Sequence[object]) -> None:
    """Print the notes of a file or its reader, the first of very many."""
    print_lines(console, (f"note: {note}" for note in note_texts(notes)))


def _fill(console: Console, line: Text, words: Sequence[Text], margin: int) -> None:
    """Print words after what `line` begins with, on as many lines as needed; no word is broken."""
    begun = False
    for word in words:
        if begun and cell_len(line.plain) + 1 + cell_len(word.plain) > console.width:
            console.print(line)
            line, begun = Text(" " * margin), False
        if begun:
            line.append(" ")
        line.append_text(word)
        begun = True
    console.print(line)


def print_items(console: Console, items: Sequence[Sequence[str]], *, indent: str = "  ") -> None:
    """Print (label, figure, words) or (label, words) in columns; the words go on under their own beginning."""
    labels = max((cell_len(item[0]) for item in items), default=0)
    figures = max((cell_len(item[1]) for item in items if len(item) == 3), default=0)
    for item in items:
        lead = Text(item[0] + " " * (labels - cell_len(item[0])) + _GAP, "dim")
        if len(item) == 3:
            lead.append(" " * (figures - cell_len(item[1])) + item[1] + _GAP, "not dim")
        print_prose(console, item[-1], indent=indent, lead=lead)


def _words(text: Text) -> list[Text]:
    """What stands between spaces, a unit with the figure before it."""
    words: list[Text] = []
    for word in text.split(" "):
        is_unit = word.plain.rstrip(".,;:)") in _UNITS
        if is_unit and words and words[-1].plain[-1:].isdigit():
            words[-1] = words[-1] + Text(" ") + word
        else:
            words.append(word)
    return words


def _line(row: Sequence[str], widths: Sequence[int], num_words: int) -> str:
    cells = []
    for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
        space = " " * (width - cell_len(cell))
        cells.append(cell + space if number < num_words else space + cell)
    return _GAP.join(cells)
