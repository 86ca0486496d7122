"""What the method is for: choosing a layer per node beats every fixed one where nodes differ."""

import numpy as np
from tqdm import tqdm

from metselect_dgl.config import Config
from metselect_dgl.experiments.grid import run_grid, settings_grid


def grid(tmp_path, base: Config, data_dir=None, **values) -> dict[str, list[dict]]:
    """Result lines of final and metselect over `values`, by selector."""
    configs = settings_grid(base, {"selector": ["final", "metselect"], **values})
    bar = tqdm(disable=True)
    rows = run_grid(configs, data_dir, tmp_path / "results.jsonl", jobs=2, bar=bar)
    return {name: [r for r in rows if r["selector"] == name] for name in ("final", "metselect")}


def test_hop_chain_over_five_seeds(tmp_path):
    rows = grid(tmp_path, Config(epochs=60), seed=range(5))
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
    """Neighbours mislead: the features of the node itself are the better layer for most nodes."""
    rows = grid(tmp_path, Config(dataset="texas", epochs=60), str(data_dir), split=range(10))
    final = np.mean([row["test_accuracy"] for row in rows["final"]])
    chosen = np.mean([row["test_accuracy"] for row in rows["metselect"]])
    assert chosen > 0.76
    assert chosen > final + 0.03
    assert np.mean([row["layer_share"][0] for row in rows["metselect"]]) > 0.4
