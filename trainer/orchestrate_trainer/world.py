"""The processes that train together: their devices, and the messages that they exchange.

Control messages go over gloo between CPUs, whichever backend carries the tensors. They have no
practical time limit, because a trainer may be idle for hours between two steps.
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

#: Time limit of control messages.
CONTROL_TIMEOUT = timedelta(days=365)


@dataclass
class World:
    """A process and its connection to the others.

    The collective methods (:meth:`broadcast`, :meth:`gather`, :meth:`sum`, :meth:`max`,
    :meth:`barrier`) must be called by all processes in the same order.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    #: Process group of the control messages.
    control: dist.ProcessGroup

    @classmethod
    def join(cls, device: str = "auto") -> World:
        """Joins the processes that ``torchrun`` started, or makes a world of one process.

        ``device`` is ``auto``, ``cuda`` or ``cpu``.
        """
        cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
        kind = "cuda" if cuda else "cpu"
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(hours=1))
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, rank=0, world_size=1, store=store)
        size = dist.get_world_size()
        mesh = init_device_mesh(kind, (size,))
        control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        assert isinstance(control, dist.ProcessGroup), "every process is a member of this group"
        current = torch.device(kind, torch.cuda.current_device()) if cuda else torch.device(kind)
        return cls(
            rank=dist.get_rank(),
            size=size,
            device=current,
            mesh=mesh,
            control=control,
        )

    @property
    def is_leader(self) -> bool:
        """Whether this process (rank 0) serves requests and writes files for all."""
        return self.rank == 0

    def device_names(self) -> list[str]:
        """The devices of all processes, by rank, for display."""
        if self.device.type == "cuda":
            own = torch.cuda.get_device_name(self.device)
        else:
            own = f"cpu, {torch.get_num_threads()} threads"
        return self.gather(own)

    def broadcast(self, value: Any) -> Any:
        """The leader's ``value``, in every process."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's ``value``, by rank, in every process."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def sum(self, values: list[float]) -> list[float]:
        """Elementwise sums over all processes, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, value: int) -> int:
        """The largest of all processes' values."""
        return int(self._reduce([value], dist.ReduceOp.MAX)[0])

    def _reduce(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        tensor: Tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation, group=self.control)
        reduced: list[float] = tensor.tolist()
        return reduced

    def barrier(self) -> None:
        """Waits until all processes have reached this call."""
        dist.barrier(group=self.control)

    def leave(self) -> None:
        """Closes this process's connections."""
        dist.destroy_process_group()
