"""Tables in plain text and in Markdown."""

from collections.abc import Sequence

Table = tuple[list[str], list[list[str]]]


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return aligned columns: the first to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        columns = [f"{row[0]:<{widths[0]}}"]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            columns.append(f"{cell:>{width}}")
        lines.append("  ".join(columns).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def markdown(table: Table) -> str:
    """Return (header, rows) in Markdown: the first column to the left, the others to the right."""
    header, rows = table
    rule = ["---", *(["---:"] * (len(header) - 1))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def percent(share: float | None) -> str:
    """Return per cent with one digit; a dash for None."""
    return "-" if share is None else f"{100 * share:.1f}"
