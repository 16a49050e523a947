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
        for segment in super().render(renderable, options):
            if not segment.control:
                lines = (printable(line, len(line) + MAX_SENTENCE) for line in segment.text.split("\n"))
                segment = segment._replace(text=encodable("\n".join(lines), self.encoding))
            yield segment
