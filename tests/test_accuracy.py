"""Accuracy: a layer per node is better than every fixed layer where nodes differ."""

import numpy as np

from metselect_dgl.config import Config
from metselect_dgl.experiments.experiment import config_grid
from metselect_dgl.experiments.run_configs import Execution, RunProgress, run_configs


def rows_by_selector(tmp_path, base: Config, data_dir=None, **values) -> dict[str, list[dict]]:
    """Return the rows of final and metselect over `values`."""
    configs = config_grid(base, {"selector": ["final", "metselect"], **values})
    execution, progress = Execution(data_dir, jobs=2), RunProgress(show=False)
    rows = run_configs(configs, tmp_path / "results.jsonl", execution, progress)
    return {name: [r for r in rows if r["selector"] == name] for name in ("final", "metselect")}


def test_hop_chain_over_five_seeds(tmp_path):
    rows = rows_by_selector(tmp_path, Config(epochs=60), seed=range(5))
    final = np.mean([row["test_accuracy"] for row in rows["final"]])
    chosen = np.mean([row["test_accuracy"] for row in rows["metselect"]])
    fixed = np.mean([row["fixed"] for row in rows["metselect"]], 0)
    assert chosen > 0.88
    assert chosen > final + 0.25
    assert (chosen > fixed + 0.25).all()
    by_type = np.mean([row["layer_share_by_type"] for row in rows["metselect"]], 0)
    assert (by_type.argmax(1) == [0, 1, 2]).all()
    assert (by_type.max(1) > 0.7).all()


def test_heterophily(tmp_path, data_dir):
    """Neighbours have other classes: layer 0, the node's own features, is best for most nodes."""
    rows = rows_by_selector(
        tmp_path, Config(dataset="texas", epochs=60), str(data_dir), split=range(10)
    )
    final = np.mean([row["test_accuracy"] for row in rows["final"]])
    chosen = np.mean([row["test_accuracy"] for row in rows["metselect"]])
    assert chosen > 0.76
    assert chosen > final + 0.03
    assert np.mean([row["layer_share"][0] for row in rows["metselect"]]) > 0.4
