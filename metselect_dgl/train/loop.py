"""The training loop on the whole graph: early stop, checkpoints that resume bit-identically."""

import dataclasses
import json
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..atomic_file import write_atomic
from ..checks import NotFiniteError
from ..config import Config
from ..data import NodeDataset, Split
from ..nn import LayerSelect, Selection, without_logits
from . import checkpoint
from .evaluate import accuracy, layer_report, scores


@dataclass
class Progress:
    """Everything a checkpoint holds besides model and optimizer."""

    epoch: int = 0
    best_epoch: int = -1
    best_accuracy: float = -1.0
    best_loss: float = float("inf")
    best_model: dict = field(default_factory=dict)
    history: list = field(default_factory=list)
    seconds: float = 0.0
    diverged: bool = False
    gathered: list = field(default_factory=list)  # moments of mini-batches, not used yet

    def better(self, val_accuracy: float, val_loss: float) -> bool:
        """Higher validation accuracy; equal ones by lower loss."""
        return (val_accuracy, -val_loss) > (self.best_accuracy, -self.best_loss)


@dataclass
class Run:
    """A trained model, what it says of every node, and the figures."""

    config: Config
    model: LayerSelect
    selection: Selection
    metrics: dict


def _on_gpu(config: Config) -> bool:
    return torch.device(config.device).type != "cpu"


def prepare(config: Config, data: NodeDataset) -> NodeDataset:
    """The data as the model sees it: normalised, on its device."""
    if _on_gpu(config) and not torch.cuda.is_available():
        raise ValueError(f"device is {config.device!r}, but torch sees no GPU; use --device cpu")
    normalize = config.row_normalize
    if normalize is None:
        normalize = bool((data.feat >= 0).all())
    data = data.row_normalized() if normalize else data
    return data.to(config.device)


class TrainingLoop:
    """One run, epoch by epoch; `data` as `prepare` gives it."""

    def __init__(self, config: Config, data: NodeDataset, out: Path | None) -> None:
        torch.manual_seed(config.seed)
        self.config, self.data, self.out = config, data, out and Path(out)
        labelled = (part[data.labels[part] >= 0] for part in data.split(config.split))
        self.split = Split(*labelled)
        for part in ("train", "val"):
            if len(getattr(self.split, part)) == 0:
                raise ValueError(
                    f"split {config.split} of {data.name} has no labelled node for {part}"
                )
        self.model = config.build(data.feat.shape[1], data.n_classes).to(config.device)
        self.optimizer = torch.optim.Adam(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=config.lr,
            weight_decay=config.weight_decay,
        )
        self.state = Progress()

    @property
    def may_diverge(self) -> bool:
        """Whether layers that are not finite end training with the best model, not the process."""
        return True

    @property
    def path(self) -> Path:
        return self.out / "checkpoint.pt"

    def finished(self) -> bool:
        waited = self.state.epoch - 1 - self.state.best_epoch
        enough = self.state.best_epoch >= 0 and waited >= self.config.patience
        return enough or self.state.diverged or self.state.epoch >= self.config.epochs

    def epoch(self) -> dict:
        """One step on the training nodes and, if it is due, one look at the validation nodes.

        Where a layer is not finite any more, training ends and the best model stays; if none was
        looked at yet, it is an error.
        """
        start, state = time.perf_counter(), self.state
        record = {"epoch": state.epoch}
        try:
            record["loss"] = self.step()
            last = state.epoch + 1 == self.config.epochs
            if last or (state.epoch + 1) % self.config.validate_every == 0:
                record |= self.judge()
        except NotFiniteError as error:
            if state.best_epoch < 0 or not self.may_diverge:
                raise
            warnings.warn(f"training diverged in epoch {state.epoch}: {error}", stacklevel=2)
            state.diverged = True
        state.history.append(record)
        state.epoch += 1
        state.seconds += time.perf_counter() - start
        return record

    def step(self) -> float:
        """One step on the training nodes; their loss."""
        data = self.data
        self.model.train()
        with without_logits(self.model):
            loss = self.model(data.graph, data.feat, data.labels, self.split.train).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def judge(self) -> dict:
        """Accuracy and loss on the validation nodes; keeps the model if they are the best."""
        held_out, state = self.validate(), self.state
        labels = self.validation_labels()
        val_accuracy = accuracy(held_out.logits.argmax(1), labels)
        val_loss = _finite_loss(held_out.logits, labels)
        if state.better(val_accuracy, val_loss):
            state.best_accuracy, state.best_loss = val_accuracy, val_loss
            state.best_epoch = state.epoch
            state.best_model = {k: v.clone() for k, v in self.model.state_dict().items()}
        return {"val_accuracy": val_accuracy, "val_loss": val_loss}

    def validate(self) -> Selection:
        """What is said of the validation nodes, with moments and calibration renewed."""
        data, split = self.data, self.split
        return self.model.calibrate(data.graph, data.feat, data.labels, split.train, split.val)

    def validation_labels(self) -> Tensor:
        """Of the nodes that `validate` speaks of."""
        return self.data.labels[self.split.val]

    def save(self) -> None:
        if self.out is None:
            return
        state = {
            "config": dataclasses.asdict(self.config),
            "data": self.data.fingerprint(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": dataclasses.asdict(self.state),
            "random": _random_states(),
        }
        checkpoint.save(state, self.path)

    def resume(self) -> None:
        """Go on from the checkpoint in `out`, if it is of the same settings."""
        saved = self._saved()
        if saved is not None:
            with checkpoint.reading(self.path):
                self._restore(saved)

    def _saved(self) -> dict | None:
        """What the checkpoint holds, if there is one."""
        there = self.out is not None and self.path.exists()
        return load_checkpoint(self.path) if there else None

    def _restore(self, saved: dict) -> None:
        old = Config(**saved["config"])
        if old != self.config:
            raise checkpoint.CheckpointError(
                f"{self.out} holds a run with other settings ({old.differences(self.config)}); "
                "choose another --out, or --overwrite"
            )
        check_data(saved, self.data, self.path)
        checkpoint.load_weights(self.model, saved["model"], self.path)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state = Progress(**saved["progress"])
        torch.set_rng_state(saved["random"][0])
        if _on_gpu(self.config):
            torch.cuda.set_rng_state_all(saved["random"][1:])

    def result(self) -> Run:
        """The best epoch's model and its figures."""
        self.model.load_state_dict(self.state.best_model)
        held_out = self.validate()
        selection = self.predict()
        metrics = self.metrics(selection, held_out)
        if self.out is not None:
            self.write(selection, metrics)
        return Run(self.config, self.model, selection, metrics)

    def predict(self) -> Selection:
        """What is said of every node."""
        self.model.eval()
        with torch.no_grad():
            return self.model(self.data.graph, self.data.feat)

    def layers(self, index: Tensor) -> list[Tensor] | None:
        """The rows of every layer, if they are not to be made from the whole graph."""

    def metrics(self, selection: Selection, held_out: Selection) -> dict:
        labels, split = self.data.labels, self.split
        answers = selection.logits.argmax(1)
        return {
            "config": dataclasses.asdict(self.config),
            "epochs": self.state.epoch,
            "best_epoch": self.state.best_epoch,
            "diverged": self.state.diverged,
            "seconds": self.state.seconds,
            "train": scores(answers[split.train], labels[split.train]),
            "val": scores(held_out.logits.argmax(1), self.validation_labels()),
            "test": scores(answers[split.test], labels[split.test]),
            **layer_report(self.model, selection, self.data, split.test, self.layers(split.test)),
        }

    def write(self, selection: Selection, metrics: dict) -> None:
        """config.yaml, metrics.json, history.json, predictions.npz and layers.png."""
        from ..plots import plot_layers

        texts = {
            "config.yaml": self.config.to_yaml(),
            "metrics.json": json.dumps(metrics, indent=1),
            "history.json": json.dumps(self.state.history),
        }
        for name, text in texts.items():
            write_atomic(self.out / name, lambda f, text=text: f.write(text.encode()))
        arrays = {
            "label": self.data.labels,
            "prediction": selection.logits.argmax(1),
            "layer": selection.layer,
            "score": selection.score,
        }
        arrays = {name: value.cpu().numpy() for name, value in arrays.items()}
        write_atomic(self.out / "predictions.npz", lambda f: np.savez(f, **arrays))
        plot_layers(metrics, self.out / "layers.png")


def _random_states() -> list[Tensor]:
    """Of the CPU and of every GPU."""
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def _finite_loss(logits: Tensor, labels: Tensor) -> float:
    """Cross entropy over the nodes of classes that can be predicted."""
    loss = F.cross_entropy(logits, labels, reduction="none")
    return loss[torch.isfinite(loss)].mean().item()


def load_checkpoint(path: Path) -> dict:
    """The parts of a run's checkpoint."""
    return checkpoint.load(path, {"config", "data", "model", "optimizer", "progress", "random"})


def check_data(saved: dict, data: NodeDataset, path: Path) -> None:
    """Whether a checkpoint is of this data."""
    if saved["data"] != data.fingerprint():
        raise checkpoint.CheckpointError(
            f"{path} was trained on other data than {data.name} is now; "
            "choose another --out, or --overwrite"
        )
