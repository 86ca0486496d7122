"""Write the results page: tables and figures beside the paper's, from the stored rows.

`reading.md` in the folder of the rows, if it exists, is included at the top.
"""

import os
from pathlib import Path

from ..atomic_file import write_atomic
from .result_rows import Rows, read_rows
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


def write_page(folder: Path, page: Path) -> str:
    """Write the page, with its figures in `folder`; return the findings."""
    rows = {name: read_rows(study.path(folder)) for name, study in STUDIES.items()}
    link = Path(os.path.relpath(folder, page.parent))
    results = StoredResults(rows, folder, link)
    findings = []
    sections = []
    for name, study in STUDIES.items():
        if rows[name]:
            findings += study.findings(rows[name])
            sections += study.section(results)
    paragraphs = [INTRODUCTION.format(link=link)]
    reading = folder / "reading.md"
    if reading.exists():
        paragraphs.append(reading.read_text().strip())
    summary = "\n".join(f"- {sentence}" for sentence in findings)
    if summary:
        paragraphs += ["## Findings", summary]
    text = "\n\n".join([*paragraphs, *sections, *_commands(rows)]) + "\n"
    write_atomic(page, lambda file: file.write(text.encode()))
    return summary


def _commands(rows: dict[str, Rows]) -> list[str]:
    """Return the section of commands, with the number of stored runs and their time."""
    table = []
    for name, study_rows in rows.items():
        trained = [row for row in study_rows if "epochs" in row]
        seeds = sorted({row["seed"] for row in trained})
        minutes = sum(row["seconds"] for row in trained) / 60
        table.append(
            [
                f"`metselect reproduce {name}`",
                str(len(study_rows)),
                ", ".join(map(str, seeds)) or "-",
                f"{minutes:.0f}" if trained else "-",
            ]
        )
    return [
        "## Commands",
        "`make results` runs all studies. Minutes are training time on one core, summed over the "
        "rows of this page, without the runs that only compared settings.",
        markdown((["", "rows", "seeds", "minutes"], table)),
    ]
