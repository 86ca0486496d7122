"""Several processes that train one model: torchrun starts them, torch.distributed connects them."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Team:
    """This process's place among `size` ones."""

    rank: int = 0
    size: int = 1

    def sum(self, vector: Tensor) -> None:
        """Add a vector up over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(vector)

    def share(self, value: Any) -> Any:
        """The first process's value."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list:
        """On the first process, the values of all; on others, their own alone."""
        if self.size == 1:
            return [value]
        box = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, box, dst=0)
        return box or [value]

    def share_buffers(self, model: nn.Module) -> None:
        """Give every process the first one's buffers."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def wrap(self, model: nn.Module, unused: bool) -> nn.Module:
        """The model whose gradients are the mean over processes; `unused`: some of its parameters
        may get none. Buffers are shared by hand, at the end of epochs."""
        if self.size == 1:
            return model
        return nn.parallel.DistributedDataParallel(
            model, forward_sync_buffers=False, find_unused_parameters=unused
        )


ALONE = Team()


@contextmanager
def team_of_torchrun(device: str = "cpu") -> Iterator[Team]:
    """The processes that torchrun started, connected until the end, which is also theirs; a process
    of its own if it did not. One that is lost ends the others with a message."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield ALONE
        return
    rank = int(os.environ["RANK"])
    lost = (
        f"another of the {size} processes was lost; run the same command again: it goes on from "
        "the last checkpoint"
    )

    def ended(*_) -> None:  # torchrun ends the others when it misses one
        sys.stderr.write(f"metselect: process {rank}: {lost}\n")
        sys.stderr.flush()
        os._exit(143)

    before = signal.signal(signal.SIGTERM, ended)
    gpu = torch.device(device).type == "cuda"
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # The others wait while the first one validates on the whole graph; one that is lost is noticed
    # by its closed connection, not by a timeout.
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(days=1))
    try:
        yield Team(rank, size)
        dist.barrier()  # nobody leaves before the first one has written its results
    except RuntimeError as error:
        if not _of_a_peer(error):
            raise
        raise RuntimeError(f"process {rank}: {lost} ({str(error).splitlines()[0]})") from error
    finally:
        signal.signal(signal.SIGTERM, before)
    dist.destroy_process_group()
    # Threads of gloo may outlive the group, and then abort an ordinary exit of the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _of_a_peer(error: RuntimeError) -> bool:
    """Whether it is what gloo or nccl say when a process is gone."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)
