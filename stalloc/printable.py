"""Text from strangers made fit for a terminal: what a file, a name or an argument says is shown and steers nothing.

Contract: the result is printable characters of one line, of a bounded length. Control characters (newlines included),
bidirectional and other format characters, line separators and halves of surrogate pairs are shown escaped, as `\\x1b`
or `\\u202e`; a text without them comes back as it is, and so does what was made printable before. Files that stalloc
writes are data and keep what they say.
"""

import unicodedata

MAX_NAME, MAX_SENTENCE = 200, 1000
"""Characters that are shown of a name, and of a sentence, in which several names may be quoted."""

_HARMLESS = ("Zs", "Co")  # spaces such as those of Chinese texts, and icons of fonts, which isprintable() refuses


def printable(text: str, limit: int = MAX_NAME) -> str:
    """The text in at most `limit` characters; of a longer one the middle is left out, marked by an ellipsis."""
    if len(text) <= limit:
        shown = _escape(text)
        if len(shown) <= limit:
            return shown
    num_last = limit // 3
    return _escape(text[:limit])[: limit - num_last - 1] + "…" + _escape(text[-num_last:])[-num_last:]


def encodable(text: str, encoding: str | None) -> str:
    """The text with escapes for what a stream of this encoding cannot hold, so that printing it never raises."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _escape(text: str) -> str:
    return text if text.isprintable() else "".join(map(_escape_character, text))


def _escape_character(char: str) -> str:
    if char.isprintable() or unicodedata.category(char) in _HARMLESS:
        return char
    return char.encode("unicode_escape").decode("ascii")
