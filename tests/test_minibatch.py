"""Mini-batches: blocks as the whole graph, moments over epochs, the training loop in batches."""

import dataclasses

import dgl
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from metselect_dgl import functional as MF
from metselect_dgl.config import Config
from metselect_dgl.data import arxiv_twin, load_dataset
from metselect_dgl.nn import (
    GAT,
    GCN,
    GIN,
    DegreeSampler,
    LayerStack,
    MetSelect,
    MetSelectHead,
    Prototypes,
    sampling_graph,
)
from metselect_dgl.train import TrainingLoop, prepare, train
from metselect_dgl.train.batches import share_out
from metselect_dgl.train.distributed import ProcessGroup

BACKBONES = {"gcn": GCN, "gat": GAT, "gin": GIN}


def looped(graph):
    return dgl.add_self_loop(graph)


@pytest.mark.parametrize("self_loop", [False, True], ids=["as-is", "self-loop"])
@pytest.mark.parametrize("kind", BACKBONES)
def test_a_block_with_all_neighbours_is_the_graph(small, kind, self_loop):
    torch.manual_seed(0)
    backbone = BACKBONES[kind](32, 16, self_loop=self_loop, allow_zero_in_degree=True)
    graph = looped(small.graph)
    whole = backbone(graph, small.feat)
    sampled = sampling_graph(backbone, graph)
    assert (sampled is graph) != self_loop
    seeds = torch.tensor([5, 3, 299, 0])
    sources, _, blocks = DegreeSampler([-1, -1], sampled).sample(sampled, seeds)
    for layer, part in zip(whole, backbone(blocks, small.feat[sources]), strict=True):
        torch.testing.assert_close(part, layer[seeds], rtol=1e-4, atol=1e-5)


def test_sampled_sums_are_unbiased(small):
    """The mean over many samples of GIN's first layer before its MLP is the whole sum."""
    backbone = GIN(32, 16, num_layers=1)
    backbone.convs[0].apply_func = torch.nn.Identity()
    whole = torch.stack([backbone.convolution.on_degrees(backbone.convs[0], *all_of(small))])
    sampler, seeds = DegreeSampler([2], small.graph), torch.arange(300)
    found = []
    for _ in range(400):
        sources, _, (block,) = sampler.sample(small.graph, seeds)
        found.append(backbone.convolution.on_degrees(backbone.convs[0], block, small.feat[sources]))
    found = torch.stack(found)
    error = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - whole[0]).abs() / error.clamp(min=1e-3)).mean() < 1.5


def all_of(data):
    sources, _, (block,) = DegreeSampler([-1], data.graph).sample(data.graph, torch.arange(300))
    return block, data.feat[sources]


def test_a_graph_of_int32(small):
    graph = small.graph.int()
    backbone = GCN(32, 16, allow_zero_in_degree=True)
    seeds = torch.tensor([5, 3], dtype=torch.int32)
    sources, _, blocks = DegreeSampler([-1, -1], graph).sample(graph, seeds)
    last = backbone(blocks, small.feat[sources.long()])[-1]
    torch.testing.assert_close(last, backbone(graph, small.feat)[-1][[5, 3]], atol=1e-5, rtol=1e-4)
    data = dataclasses.replace(small, graph=graph)
    train(settings(epochs=2), data, progress=False)


def test_loops_that_would_count_twice_are_refused(small):
    graph = looped(small.graph)
    sources, _, blocks = DegreeSampler([-1, -1], graph).sample(graph, torch.arange(4))
    with pytest.raises(ValueError, match="remove_self_loop"):
        GCN(32, 16, self_loop=True)(blocks, small.feat[sources])


def test_a_node_without_in_edges_on_a_block():
    graph, feat = dgl.graph(([0], [1]), num_nodes=2), torch.ones(2, 3)
    sources, _, blocks = DegreeSampler([5], graph).sample(graph, torch.arange(2))
    with pytest.raises(dgl.DGLError, match="0-in-degree"):
        GCN(3, 4, num_layers=1)(blocks, feat[sources])
    GCN(3, 4, num_layers=1, allow_zero_in_degree=True)(blocks, feat[sources])


def batches_of(n=90, parts=4, seed=0):
    torch.manual_seed(seed)
    h, y = 3 + torch.randn(n, 6), torch.arange(n) % 3
    return h, y, list(zip(h.tensor_split(parts), y.tensor_split(parts), strict=True))


def test_the_moments_of_an_epoch_are_those_of_its_nodes():
    h, y, parts = batches_of()
    whole, batched = Prototypes([6], 3), Prototypes([6], 3, source="epoch")
    whole.update([h], y)
    for rows, labels in parts:
        batched.learn(LayerStack.of([rows]), labels)
    batched.renew()
    for old, new in zip(whole.buffers(), batched.buffers(), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-5, atol=1e-6)
    assert batched.gathered is None


def test_an_epoch_uses_the_moments_of_the_one_before():
    _, _, parts = batches_of()
    prototypes = Prototypes([6], 3, source="epoch")
    for _ in range(2):
        for rows, labels in parts:
            prototypes.learn(LayerStack.of([rows]), labels)
        prototypes.renew()
    before = prototypes.mean_0.clone()
    for rows, labels in parts:
        prototypes.learn(LayerStack.of([rows + 100]), labels)
        assert torch.equal(prototypes.mean_0, before)
    prototypes.renew()
    torch.testing.assert_close(prototypes.mean_0, before + 100, rtol=1e-5, atol=1e-4)


def test_a_moving_average_weighs_by_age():
    _, _, parts = batches_of(parts=2)
    prototypes = Prototypes([6], 3, source="ema")
    for rows, labels in parts:
        prototypes.learn(LayerStack.of([rows]), labels)
    (a, y), (b, z) = parts
    old, new = (MF.moments([rows], labels, 3) for rows, labels in ((a, y), (b, z)))
    expected = (0.9 * old.count[:, None] * old.means()[0] + new.count[:, None] * new.means()[0]) / (
        0.9 * old.count + new.count
    )[:, None]
    torch.testing.assert_close(prototypes.mean_0, expected.float(), rtol=1e-5, atol=1e-5)


def test_a_class_that_was_seen_long_ago_keeps_its_mean():
    prototypes = Prototypes([2], 2, source="ema")
    prototypes.learn(LayerStack.of([20 + torch.randn(1, 2)]), torch.tensor([1]))
    seen = prototypes.mean_0[1].clone()
    for _ in range(40):
        prototypes.learn(LayerStack.of([torch.randn(8, 2)]), torch.zeros(8, dtype=torch.long))
    assert 0 < prototypes.count[1] < 0.02
    torch.testing.assert_close(prototypes.mean_0[1], seen, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", ["epoch", "ema"])
def test_layers_that_move_away_between_epochs(source):
    """By ten thousand standard deviations: the covariance stays that of the rows."""
    h, y, parts = batches_of(n=600)
    prototypes, expected = Prototypes([6], 3, source=source), Prototypes([6], 3)
    for move in (0, 1e4, -1e4):
        for _ in range(1 if source == "epoch" else 40):
            for rows, labels in parts:
                prototypes.learn(LayerStack.of([rows + move]), labels)
            prototypes.renew()
    expected.update([h - 1e4], y)
    if source == "epoch":
        torch.testing.assert_close(prototypes.factor_0, expected.factor_0, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(prototypes.mean_0, expected.mean_0, rtol=1e-4, atol=1)


@pytest.mark.parametrize("source", ["epoch", "ema"])
@pytest.mark.parametrize("started", [False, True], ids=["first", "later"])
def test_moments_of_processes_add_up(source, started):
    """Each with other rows and shifts, one with none; `merge` as an all-reduce would do it."""
    h, y, parts = batches_of(parts=2)
    alone = Prototypes([6], 3, source="epoch")
    processes = [Prototypes([6], 3, source=source) for _ in range(3)]
    if started:
        for prototypes in (alone, *processes):
            prototypes.update([h + 1], y)
    alone.learn(LayerStack.of([h]), y)
    alone.renew()
    for prototypes, (rows, labels) in zip(processes, parts, strict=False):
        prototypes.gather(LayerStack.of([rows]), labels)
    vectors = []
    for prototypes in processes:  # what every process would send
        with pytest.raises(InterruptedError):
            prototypes.renew(lambda vector: (vectors.append(vector), stop()))
    for prototypes in processes:
        prototypes.renew(lambda vector: vector.copy_(sum(vectors)))
        for old, new in zip(alone.buffers(), prototypes.buffers(), strict=True):
            torch.testing.assert_close(old, new, rtol=1e-5, atol=1e-5)
        if source == "ema":
            assert prototypes.gathered.count.sum() == pytest.approx(len(y) / 3)
            mean = prototypes.gathered.means()[0].float()
            torch.testing.assert_close(mean, alone.mean_0, rtol=1e-5, atol=1e-5)


def stop():
    raise InterruptedError


def test_renewing_from_nothing_is_an_error():
    with pytest.raises(RuntimeError, match="no training calls"):
        Prototypes([6], 3, source="epoch").renew()


def test_options_that_do_not_go_together():
    with pytest.raises(ValueError, match="moments is 'often'; use one of call, epoch, ema"):
        MetSelectHead([4], 2, moments="often")
    with pytest.raises(ValueError, match="ledoit_wolf needs two"):
        MetSelectHead([4], 2, moments="epoch", shrinkage="ledoit_wolf")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("n", [7, 12, 13, 25])
def test_batches_are_shared_out_evenly(n, size):
    order = torch.randperm(n)
    every = [share_out(order, 4, ProcessGroup(rank, size)) for rank in range(size)]
    assert len({len(parts) for parts, _ in every}) == 1
    seen = torch.cat([part for parts, _ in every for part in parts])
    assert sorted(seen.tolist()) == list(range(n))
    for step in range(len(every[0][0])):
        parts, weights = zip(*((p[step], w[step]) for p, w in every), strict=True)
        assert min(map(len, parts)) > 0
        assert sum(weights) == pytest.approx(size)
        nodes = torch.cat(parts).double()
        mean = sum(w * part.double().mean() for w, part in zip(weights, parts, strict=True)) / size
        assert mean.item() == pytest.approx(nodes.mean().item())


def settings(**given) -> Config:
    return Config(**{"epochs": 6, "batch_size": 40, "fanout": 3, "hidden": 16, **given})


def test_a_step_with_one_batch_of_all_is_the_step_on_the_graph(small):
    """All neighbours, all nodes, moments of the call: the same weights to rounding."""
    config = settings(batch_size=10**6, fanout=-1, moments="call", propagate_once=False)
    batched = train(config, small, progress=False)
    whole = train(dataclasses.replace(config, batch_size=None), small, progress=False)
    for name, value in whole.model.backbone.state_dict().items():
        torch.testing.assert_close(
            batched.model.backbone.state_dict()[name], value, rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("selector", ["metselect", "metselect-paper", "metselect-max", "final"])
def test_every_selector_of_single_layers_trains(small, selector):
    run = train(settings(selector=selector), small, progress=False)
    assert run.selection.logits.shape == (300, 5)
    assert 0 < run.metrics["test"]["accuracy"] <= 1


def test_other_selectors_are_refused(small):
    with pytest.raises(ValueError, match="'attn' compares whole layers"):
        train(settings(selector="attn"), small, progress=False)


@pytest.mark.parametrize("moments", ["epoch", "ema", "call"])
def test_a_stopped_run_goes_on_bit_by_bit(small, tmp_path, moments, monkeypatch):
    config = settings(moments=moments)
    straight = train(config, small, tmp_path / "a", progress=False)
    epoch = TrainingLoop.epoch

    def mortal(loop):
        if loop.state.epoch == 4:
            raise InterruptedError
        return epoch(loop)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "epoch", mortal)
        with pytest.raises(InterruptedError):
            train(config, small, tmp_path / "b", progress=False, checkpoint_every=2)
    resumed = train(config, small, tmp_path / "b", progress=False)
    pairs = zip(
        straight.model.state_dict().values(), resumed.model.state_dict().values(), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)


def test_validation_leaves_the_moments_of_training_alone(small):
    config = settings()
    loop = TrainingLoop(config, prepare(config, small), None)
    loop.step()
    prototypes = loop.model.head.prototypes
    before = {k: v.clone() for k, v in prototypes.state_dict().items()}
    loop.evaluate()
    assert all(
        torch.equal(v, before[k]) for k, v in loop.model.head.prototypes.state_dict().items()
    )
    assert loop.state.best_model["head.comparer.temperature"].ne(1).any()


class Largest(TorchDispatchMode):
    """How many entries the largest tensor has that any operator makes."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, list | tuple) else [out]:
            changed = any(each is given for given in args)  # in place: DGL's sampler keeps a map
            if isinstance(each, torch.Tensor) and not changed:
                self.entries = max(self.entries, each.numel())
        return out


def test_a_batch_does_not_depend_on_the_size_of_the_graph():
    """Nothing that a step makes is as long as the graph has nodes, or as its training nodes."""
    data = arxiv_twin(scale=0.2)
    config = settings(batch_size=8, fanout=2, hidden=8)
    loop = TrainingLoop(config, prepare(config, data), None)
    batches = loop.batches.epoch(0)
    with Largest() as largest:
        _, blocks, feat, labels, _ = next(batches)
    assert len(labels) == 8  # of that epoch's order
    assert largest.entries >= len(loop.batches.split.train)  # which is drawn before the first
    with Largest() as largest:
        _, blocks, feat, labels, _ = next(batches)
        loop.model(blocks, feat, labels).loss.backward()
    assert largest.entries < len(loop.batches.split.train) < data.graph.num_nodes()


def test_mini_batches_reach_the_accuracy_of_the_whole_graph(data_dir):
    """Cora, three splits, within 1.5 points of full-batch training with the same settings."""
    data = load_dataset("cora", data_dir)
    common = Config(dataset="cora", self_loop=True, epochs=100, patience=50, validate_every=5)
    gaps = []
    for split in range(3):
        whole = dataclasses.replace(common, split=split)
        batched = dataclasses.replace(whole, batch_size=256, epochs=40)
        found = [
            train(each, data, progress=False).metrics["test"]["accuracy"]
            for each in (whole, batched)
        ]
        gaps.append(found[0] - found[1])
    assert sum(gaps) / 3 < 0.015


def test_blocks_by_hand(small):
    """As README shows it."""
    model = MetSelect(GCN(32, 16, allow_zero_in_degree=True), 5, moments="epoch")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    part, sampler = small.split(0), DegreeSampler([5, 5], small.graph)
    loader = dgl.dataloading.DataLoader(
        small.graph, part.train, sampler, batch_size=30, shuffle=True
    )
    for _ in range(3):
        for sources, seeds, blocks in loader:
            optimizer.zero_grad()
            model(blocks, small.feat[sources], small.labels[seeds]).loss.backward()
            optimizer.step()
        model.renew_moments()
    assert model.head.prototypes.count.sum() == len(part.train)
