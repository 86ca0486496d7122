"""Tables in plain text and in Markdown."""

from collections.abc import Sequence

Table = tuple[list[str], list[list[str]]]


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        right = (f"{c:>{w}}" for c, w in zip(others, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *right]).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def markdown(table: Table) -> str:
    """(header, rows) in Markdown, the first column to the left and the others to the right."""
    header, rows = table
    rule = ["---", *(["---:"] * (len(header) - 1))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def percent(share: float | None) -> str:
    """One digit after the point; a dash for what there is not."""
    return "-" if share is None else f"{100 * share:.1f}"
