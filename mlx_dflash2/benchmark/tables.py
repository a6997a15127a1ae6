"""Tables of a report: as Markdown, and as wide as a terminal is."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill


@dataclass
class Table:
    """Cells with a header; the first column has the names of the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Format it as Markdown."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def text(self, width: int) -> str:
        """Format it for a terminal; where it is too wide, each row becomes a list of its cells."""
        lines = [self.header, *self.rows]
        sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
        if sum(sizes) + 2 * (len(sizes) - 1) <= width:
            aligned = (
                "  ".join(c.ljust(n) for c, n in zip(line, sizes, strict=True)) for line in lines
            )
            return "\n".join(line.rstrip() for line in aligned)
        return "\n".join(self._list(row, width) for row in self.rows)

    def _list(self, row: Sequence[str], width: int) -> str:
        cells = zip(self.header[1:], row[1:], strict=True)
        lines = [fill(f"{name}: {cell}", width, initial_indent="  ", subsequent_indent="    ")
                 for name, cell in cells if cell != "–"]  # fmt: skip
        return "\n".join([fill(row[0], width), *lines])


Part = Table | str


def markdown(parts: Sequence[Part]) -> str:
    """Format tables and paragraphs as Markdown."""
    texts = [part if isinstance(part, str) else part.markdown() for part in parts]
    return "\n\n".join(texts) + "\n"


def terminal(parts: Sequence[Part], width: int) -> str:
    """Format tables and paragraphs for a terminal of some columns."""
    return "\n\n".join(
        fill(part, width) if isinstance(part, str) else part.text(width) for part in parts
    )
