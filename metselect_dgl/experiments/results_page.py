"""The results page: tables and figures beside the paper's, from the stored rows."""

import os
from pathlib import Path

from ..atomic_file import write_atomic
from .result_rows import read_rows
from .studies import STUDIES, StoredResults
from .tables import markdown

INTRODUCTION = """\
# Results

Results of `metselect reproduce` beside the paper's. A table cell holds the mean test accuracy in
per cent with its standard deviation over splits, the paired difference to FinalSelect with its
standard error, and in italics the paper's figure. For the tables, the settings of every model were
chosen on validation nodes alone by the same small search (`experiments/tuning.py`); in the figures
all models have the same settings.
All rows, with their settings, are in [{link}]({link})."""
COMMANDS = (
    "## Commands\n\n"
    "`make results` runs all studies. Minutes are training time on one core, summed over the rows "
    "of this page, without the runs that only compared settings."
)


def write_page(folder: Path, page: Path) -> str:
    """Write the page, with its figures in `folder` and, at the top, the folder's `reading.md`, if
    it exists; return the findings."""
    rows = {name: read_rows(study.path(folder)) for name, study in STUDIES.items()}
    results = StoredResults(rows, folder, Path(os.path.relpath(folder, page.parent)))
    findings, sections, commands = [], [], []
    for name, study in STUDIES.items():
        if rows[name]:
            findings += study.findings(rows[name])
            sections += study.section(results)
        trained = [row for row in rows[name] if "epochs" in row]
        seeds = ", ".join(map(str, sorted({row["seed"] for row in trained})))
        minutes = f"{sum(row['seconds'] for row in trained) / 60:.0f}" if trained else "-"
        commands.append(
            [f"`metselect reproduce {name}`", str(len(rows[name])), seeds or "-", minutes]
        )
    paragraphs = [INTRODUCTION.format(link=results.link)]
    reading = folder / "reading.md"
    if reading.exists():
        paragraphs.append(reading.read_text().strip())
    summary = "\n".join(f"- {sentence}" for sentence in findings)
    if summary:
        paragraphs += ["## Findings", summary]
    table = markdown((["", "rows", "seeds", "minutes"], commands))
    text = "\n\n".join([*paragraphs, *sections, COMMANDS, table]) + "\n"
    write_atomic(page, lambda file: file.write(text.encode()))
    return summary
