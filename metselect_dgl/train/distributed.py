"""Several processes that train one model: torchrun starts them, torch.distributed connects them."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_SIGNAL_SECONDS = 5  # within which torchrun's signal arrives after another process exited


@dataclass(frozen=True)
class ProcessGroup:
    """The rank of this process among `size` processes."""

    rank: int = 0
    size: int = 1

    def sum(self, vector: Tensor) -> None:
        """Add a vector up over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(vector)

    def broadcast(self, value: Any) -> Any:
        """Return the value of the first process."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list:
        """Return, on the first process, the values of all; on others, their own alone."""
        if self.size == 1:
            return [value]
        box = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, box, dst=0)
        return box or [value]

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give every process the buffers of the first one."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def wrap(self, model: nn.Module, unused: bool) -> nn.Module:
        """Return the model whose gradients are the mean over processes; `unused`: some of its
        parameters may get none. Buffers are broadcast at the end of epochs."""
        if self.size == 1:
            return model
        return nn.parallel.DistributedDataParallel(
            model, forward_sync_buffers=False, find_unused_parameters=unused
        )


SINGLE = ProcessGroup()


class WorkerExited(RuntimeError):
    """Another process of the group exited, and torchrun ends this one."""


@contextmanager
def process_group(device: str = "cpu") -> Iterator[ProcessGroup]:
    """Connect the processes that torchrun started, or return a group of one if it did not.

    When a worker exits, torchrun sends SIGTERM to the others: that signal, not the text of an
    error, is what makes this one stop with `WorkerExited`.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield SINGLE
        return
    rank = int(os.environ["RANK"])

    def stop(*_) -> None:
        raise WorkerExited(
            f"process {rank}: another of the {size} processes exited; run the same command again: "
            "it resumes from the last checkpoint"
        )

    before = signal.signal(signal.SIGTERM, stop)
    gpu = torch.device(device).type == "cuda"
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # The others wait while the first one validates on the whole graph: no timeout of minutes.
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(days=1))
    try:
        yield ProcessGroup(rank, size)
        dist.barrier()  # nobody leaves before the first one has written its results
    except WorkerExited:
        raise
    except RuntimeError:
        time.sleep(_SIGNAL_SECONDS)  # a broken connection: the signal, if any, follows
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    dist.destroy_process_group()
