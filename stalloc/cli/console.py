"""Standard output as rich knows it: what would steer a terminal, or cannot be encoded, is shown escaped."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from stalloc.printable import MAX_SENTENCE, encodable, printable


class OurConsole(Console):
    """Where `table_console` prints."""

    def on_broken_pipe(self) -> None:
        """Nobody reads any more, which is no failure; the command line ends quietly."""
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The pieces that are printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=self._shown(segment.text))

    def _shown(self, text: str) -> str:
        lines = (printable(line, len(line) + MAX_SENTENCE) for line in text.split("\n"))
        return encodable("\n".join(lines), self.encoding)
