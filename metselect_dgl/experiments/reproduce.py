"""Run the studies of the paper and write the results page.

A study stores its result rows below `<out>`; all runs, also those that only compared settings, are
logged in `<out>/log/runs.jsonl`, from which an interrupted call resumes.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..atomic_file import write_atomic
from ..data import load_dataset
from .result_rows import read_rows
from .run_configs import Execution
from .studies import STUDIES, ReproduceSettings, StoredResults, Study
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


def reproduce(
    studies: Sequence[Study], settings: ReproduceSettings, out: Path, execution: Execution
) -> list[str]:
    """Run what is missing of the studies; return a message for every dataset that cannot be
    loaded."""
    errors: dict[str, str] = {}  # by dataset; "": it can be loaded
    for study in studies:
        print(f"{study.name}: {study.title}", flush=True)
        available = []
        for dataset in study.datasets(settings):
            source = study.dataset_prefix + dataset
            if source not in errors:
                errors[source] = ""
                try:
                    load_dataset(source, execution.data_dir)
                except (ImportError, RuntimeError) as error:
                    errors[source] = str(error)
            if not errors[source]:
                available.append(dataset)
        study.run(replace(settings, datasets=available), out, execution)
    return [error for error in errors.values() if error]


def write_page(folder: Path, page: Path) -> str:
    """Write the results page, with its figures in `folder` and, at the top, the `reading.md` of the
    folder, if it exists; return the findings."""
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
