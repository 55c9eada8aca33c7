"""The processes that train together: devices, and the few things they say to each other.

Control messages go over gloo between CPUs, whatever carries the tensors, and wait as long as it
takes: a trainer may be idle for hours between two steps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["World"]

IDLE = timedelta(days=365)


@dataclass
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    control: dist.ProcessGroup

    @classmethod
    def join(cls, device: str = "auto") -> "World":
        """Joins the processes that ``torchrun`` started, or makes a world of one."""
        cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
        kind = "cuda" if cuda else "cpu"
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(hours=1))
        else:
            dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        size = dist.get_world_size()
        current = torch.device(kind, torch.cuda.current_device()) if cuda else torch.device(kind)
        return cls(
            rank=dist.get_rank(),
            size=size,
            device=current,
            mesh=init_device_mesh(kind, (size,)),
            control=dist.new_group(backend="gloo", timeout=IDLE),
        )

    @property
    def leads(self) -> bool:
        """Whether this process answers and writes for all."""
        return self.rank == 0

    def describe(self) -> list[str]:
        """The devices of all processes, for people."""
        if self.device.type == "cuda":
            own = torch.cuda.get_device_name(self.device)
        else:
            own = f"cpu, {torch.get_num_threads()} threads"
        return self.gather(own)

    def share(self, value: Any) -> Any:
        """The leader's ``value``, everywhere."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's ``value``, by rank, everywhere."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all processes, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def most(self, value: int) -> int:
        """The largest of all processes' values."""
        return int(self._reduce([value], dist.ReduceOp.MAX)[0])

    def _reduce(self, values: list[float], how: dist.ReduceOp) -> list[float]:
        tensor: Tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, how, group=self.control)
        return tensor.tolist()

    def barrier(self) -> None:
        """Waits for all."""
        dist.barrier(group=self.control)

    def leave(self) -> None:
        """Ends this process's part."""
        dist.destroy_process_group()
