"""The interface of a study: a table or figure of the paper that `metselect reproduce` repeats,
and the settings that all studies share."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...config import SELECTOR_TITLES, Config
from .. import paper
from ..experiment import RUN_FIELDS, Experiment
from ..result_rows import Rows, add_rows

if TYPE_CHECKING:  # it imports DGL, and the command line lists the studies without it
    from ..run_configs import Execution

_FIGURES = "epochs best_epoch diverged seconds code fixed oracle lucky_oracle layer_share".split()


@dataclass(frozen=True)
class ReproduceSettings:
    """Datasets, models, splits and training settings of all studies; a study may use a part."""

    datasets: Sequence[str] = paper.DATASETS
    backbones: Sequence[str] = ("gcn", "gat", "gin")
    selectors: Sequence[str] = tuple(name for name in SELECTOR_TITLES if "jknet" not in name)
    splits: int = 10
    recipe: Config = Config()  # noqa: RUF009  frozen

    def narrowed(self, splits: int | None = None, **names: list[str] | None) -> "ReproduceSettings":
        """Return a copy with the datasets, backbones and selectors that the user named; None keeps
        the default."""
        changes = {"splits": splits} if splits else {}
        for field, values in names.items():
            if values:
                check_names(field, values, getattr(FULL, field))
                changes[field] = tuple(dict.fromkeys(values))
        return replace(self, **changes)


def check_names(field: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError for a name that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not one of the {field}: {', '.join(known)}")


FULL = ReproduceSettings()
QUICK = ReproduceSettings(
    datasets=("cora", "wisconsin", "texas"),
    backbones=("gcn",),
    selectors=("final", "metselect", "metselect-paper"),
    splits=3,
    recipe=Config(epochs=100, patience=25),
)


@dataclass(frozen=True)
class StoredResults:
    """The stored rows of all studies, by name, and their folder as a path and as a link."""

    rows: dict[str, Rows]
    folder: Path
    link: Path


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper.

    Rows whose models have the names of Table 2 but other settings are stored in a `subfolder`.
    `part_of_quick`: whether `reproduce --quick` runs the study by default. `gcn_only`: whether it
    has no other backbone than GCN.
    """

    name: str
    title: str
    subfolder: str = ""
    part_of_quick: bool = True
    gcn_only: bool = False

    dataset_prefix: ClassVar[str] = ""  # of the names under which its datasets are loaded

    def quick(self) -> "Study":
        """Return the study as `reproduce --quick` runs it."""
        return self

    def datasets(self, settings: ReproduceSettings) -> Sequence[str]:
        """Return the datasets of the paper that the study uses."""
        return () if self.gcn_only and "gcn" not in settings.backbones else settings.datasets

    def experiments(self, settings: ReproduceSettings) -> list[Experiment]:
        """Return the models to run."""
        raise NotImplementedError

    def findings(self, rows: Rows) -> list[str]:
        """Return sentences that summarise the rows."""
        return []

    def section(self, results: StoredResults) -> list[str]:
        """Return the paragraphs of the results page and draw its figures."""
        raise NotImplementedError

    def path(self, out: Path) -> Path:
        """Return the file of the study's rows."""
        return Path(out) / self.subfolder / f"{self.name}.jsonl"

    def run(self, settings: ReproduceSettings, out: Path, execution: "Execution") -> None:
        """Run what is missing and store the rows."""
        from ..tuning import run_experiments

        rows = []
        log = out / "log" / "runs.jsonl"
        for outcome in run_experiments(self.experiments(settings), log, execution):
            rows += [self._row(outcome.settings, run) for run in outcome.rows]
        add_rows(rows, self.path(out))

    def _row(self, searched: dict, run: dict) -> dict:
        """Return the stored row of a run: its figures, and the settings that were searched or
        differ from the defaults."""
        settings = dict(searched)
        for name, value in asdict(Config(**run["config"])).items():
            if name not in RUN_FIELDS and value != getattr(Config(), name):
                settings[name] = value
        return {
            "study": self.name,
            **{name: run[name] for name in (*RUN_FIELDS, "val_accuracy", "test_accuracy")},
            "train_accuracy": run["train"]["accuracy"],
            "macro_f1": run["test"]["macro_f1"],
            "weighted_f1": run["test"]["weighted_f1"],
            "settings": settings,
            **{name: _rounded(run[name]) for name in _FIGURES if name in run},
        }


def _rounded(value):
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value
