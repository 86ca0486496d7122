"""Tables of accuracies beside the paper's, and of what the selection gains."""

from collections.abc import Mapping

from ...config import SELECTOR_TITLES
from .. import paper
from ..result_rows import (
    Rows,
    SelectionGain,
    accuracies,
    delta_max,
    format_difference,
    format_mean,
    mean_accuracies,
    rows_by_model,
)
from ..tables import markdown, percent

TITLES = SELECTOR_TITLES | {
    "metselect": "**MetSelect** (our default)",
    "metselect-paper": "MetSelect as in the paper",
}


def accuracy_table(
    rows: Rows,
    backbone: str,
    printed: Mapping[str, Mapping[str, paper.Figure]],
    printed_delta: Mapping[str, float],
) -> str | None:
    """Return a table of selectors and datasets; None if the backbone was not run."""
    groups = rows_by_model(rows)
    deltas = delta_max(mean_accuracies(rows, backbone))
    table = []
    for selector, title in TITLES.items():
        if selector not in printed and selector not in deltas:
            continue
        printed_name = "metselect" if selector == "metselect-paper" else selector
        cells = [title]
        for dataset in paper.DATASETS:
            group = groups.get((backbone, selector, dataset))
            final = groups.get((backbone, "final", dataset)) if selector != "final" else None
            cells.append(_accuracy_cell(group, final, printed[printed_name][dataset]))
        delta = f"{deltas[selector]:.2f}" if selector in deltas else ""
        if delta and printed_name in printed_delta:
            delta += f"<br>*{printed_delta[printed_name]:.2f}*"
        table.append([*cells, delta])
    return markdown((["", *paper.DATASETS, "Δ max"], table)) if deltas else None


def _accuracy_cell(rows: Rows | None, final: Rows | None, printed: paper.Figure) -> str:
    deviation = f" *±{printed.std:g}*" if printed.std else ""
    lines = [f"*{printed.mean:g}*{deviation}"]
    if not rows:
        return "<br>".join(["not run", *lines])
    if final:
        lines.insert(0, format_difference(rows, final))
    return "<br>".join([format_mean(accuracies(rows)), *lines])


def gain_table(rows: Rows, backbone: str, selector: str) -> list[str]:
    """Return the table of fixed layers, selection and oracles; nothing if there are no layers to
    compare."""
    groups = rows_by_model(rows)
    columns = {}
    for dataset in paper.DATASETS:
        group = groups.get((backbone, selector, dataset))
        gain = SelectionGain.from_rows(group) if group else None
        if gain:
            columns[dataset] = gain.table()
    if not columns:
        return []
    table = []
    for title in next(iter(columns.values())):
        bold = f"**{title}**" if title == "selected per node" else title
        table.append([bold, *(percent(column[title]) for column in columns.values())])
    model = f"{SELECTOR_TITLES[selector]}, {backbone.upper()}"
    return [markdown(([f"{model}, %", *columns], table))]
