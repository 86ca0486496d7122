"""How much of the paper `metselect reproduce` runs, and with which settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import Config
from . import paper

STUDIES = {
    "accuracy": "Table 2",
    "time": "Table 3",
    "self-loops": "Table 4",
    "aggregation": "Table 5",
    "depth": "figure: accuracy against depth",
    "attack": "figure: accuracy under Mettack, on the public poisoned graphs",
    "fresh-attack": "the same on graphs poisoned here",
}


@dataclass(frozen=True)
class Scope:
    """The datasets, models and runs of every study."""

    datasets: Sequence[str] = paper.DATASETS
    backbones: Sequence[str] = ("gcn", "gat", "gin")
    selectors: Sequence[str] = (
        "final",
        "ndls",
        "attn",
        "metselect",
        "metselect-paper",
        "metselect-max",
    )
    splits: int = 10
    # The same for every model: at most 200 epochs, every fifth judged on the validation nodes.
    recipe: Config = Config(epochs=200, patience=50, validate_every=5)  # noqa: RUF009  frozen
    depths: Sequence[int] = (2, 4, 8, 16, 32, 64, 128)
    depth_splits: int = 3
    attacked: Sequence[str] = ("cora", "citeseer")
    rates: Sequence[int] = (0, 5, 10, 15, 20)
    seeds: int = 5

    def narrowed(self, **asked) -> "Scope":
        """With what the user asked for in place of the default; None: not asked."""
        known = Scope()
        for name in ("datasets", "backbones", "selectors"):
            for value in asked[name] or ():
                if value not in getattr(known, name):
                    raise ValueError(
                        f"{name[:-1]} {value!r} is not in the paper's tables; "
                        f"use some of {', '.join(getattr(known, name))}"
                    )
        return replace(self, **{name: value for name, value in asked.items() if value})


FULL = Scope()
QUICK = Scope(
    datasets=("cora", "wisconsin", "texas"),
    backbones=("gcn",),
    selectors=("final", "metselect", "metselect-paper"),
    splits=3,
    recipe=replace(FULL.recipe, epochs=100, patience=25),
    depths=(2, 16),
    depth_splits=1,
    attacked=("cora",),
    rates=(0, 20),
    seeds=2,
)
