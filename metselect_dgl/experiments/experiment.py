"""An experiment: one model on one dataset, and the settings to search for it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..config import Config

# Values to try, by setting: every combination of a group is compared.
SearchGroup = Mapping[str, Sequence]

# Searched for every model, after the groups of its backbone and before those of its selector.
COMMON_SEARCH: Sequence[SearchGroup] = ({"weight_decay": (5e-4, 0.0)}, {"lr": (0.01, 0.03)})
BACKBONE_SEARCH: Mapping[str, SearchGroup] = {"gin": {"batch_norm": (False, True)}}
SELECTOR_SEARCH: Mapping[str, SearchGroup] = {"ndls": {"eps": (0.03, 0.1, 0.3)}}


@dataclass(frozen=True)
class Experiment:
    """A config, the groups of settings to search, and the number of splits and seeds to run."""

    base: Config
    search: Sequence[SearchGroup] = ()
    splits: int = 10
    seeds: int = 1

    def searched(self) -> dict:
        """Return the settings that are searched, with their values in `base`."""
        return {name: getattr(self.base, name) for group in self.search for name in group}

    def first_values(self) -> dict:
        """Return the first value of every searched setting."""
        return {name: values[0] for group in self.search for name, values in group.items()}

    def with_settings(self, settings: Mapping) -> "Experiment":
        """Return a copy with these settings in `base`."""
        return replace(self, base=replace(self.base, **settings))

    def trials(self, group: SearchGroup, splits: int) -> list[Config]:
        """Return the configs that compare the settings of a group."""
        return config_grid(self.base, {**group, "split": range(splits)})

    def runs(self) -> list[Config]:
        """Return the configs of all splits and seeds."""
        seeds = range(self.base.seed, self.base.seed + self.seeds)
        return config_grid(self.base, {"split": range(self.splits), "seed": seeds})


def config_grid(base: Config, values: Mapping[str, Sequence]) -> list[Config]:
    """Return `base` with every combination of the values."""
    configs = []
    for combination in product(*values.values()):
        configs.append(replace(base, **dict(zip(values, combination, strict=True))))
    return configs


def searched_experiment(
    base: Config,
    splits: int,
    seeds: int = 1,
    *,
    first: SearchGroup | None = None,
    fixed: Collection[str] = (),
) -> Experiment:
    """Return an experiment that searches `first`, then the groups of its backbone, of all models
    and of its selector, without the `fixed` settings."""
    groups = [
        first or {},
        BACKBONE_SEARCH.get(base.backbone, {}),
        *COMMON_SEARCH,
        SELECTOR_SEARCH.get(base.selector, {}),
    ]
    search = []
    for group in groups:
        open_settings = {name: values for name, values in group.items() if name not in fixed}
        if open_settings:
            search.append(open_settings)
    return Experiment(base, search, splits, seeds)
