"""Where the time of a step goes: seconds by part, and the least that each part can take.

The parts divide a step's time without gaps: at each boundary a mark ends one part and begins the
next. On CUDA marks are events in the device's stream, so time in which the device waits for the
host belongs to the part that made it wait.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from .cost import ForwardCost
from .learner import Learner
from .policy import Policy
from .routers import spec_of

__all__ = ["PARTS", "PartTimes", "StepFloors", "table", "timed_parts"]

#: Parts of a step with what they comprise.
PARTS = {
    "attention": "forward: attention with its projections",
    "routers": "forward: routers and replay",
    "experts": "forward: routed experts",
    "layers, rest": "forward: norms, residuals, shared experts, embedding, gathering of parameters",
    "head and loss": "forward: output head, loss and measurements",
    "backward": "backward without what activation checkpointing repeats",
    "repeated forward": "backward: what activation checkpointing repeats",
    "optimizer": "AdamW's update",
    "host waits": "the host reads results; the device has nothing to do",
    "other": "planning, copies to the device, gradient norms, metrics",
}
#: Methods of a tensor by which the host reads values.
READS = ("tolist", "item", "cpu", "numpy")
#: Memory bandwidth of a device in GB/s, by a part of its name.
PEAK_GBPS = {"H200": 4800.0, "H100": 3350.0, "B200": 8000.0, "A100": 2039.0}


class PartTimes:
    """Seconds by part, from marks in the order of time."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.in_backward = False

    def begin(self, part: str) -> None:
        """Ends the current part and begins ``part``."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    @property
    def current(self) -> str:
        """The part that began last."""
        return self._marks[-1][0]

    def seconds(self) -> dict[str, float]:
        """Seconds of each part of :data:`PARTS`, from the first mark to the last one."""
        if self._cuda:
            torch.cuda.synchronize()
        found: defaultdict[str, float] = defaultdict(float)
        for (part, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            found[part] += start.elapsed_time(end) / 1e3 if self._cuda else end - start
        return {part: found[part] for part in PARTS}


@contextmanager
def timed_parts(learner: Learner, device: torch.device) -> Iterator[PartTimes]:
    """Measures the parts of what runs inside the context: steps of ``learner``.

    Layers must not be compiled, because marks inside of them would divide what is compiled.
    """
    times = PartTimes(device)
    policy = learner.policy
    with ExitStack() as stack:

        def around(module: nn.Module, before: str, after: str) -> None:
            """Marks a module's forward, outside of backward."""

            def begin(part: str) -> Callable[..., None]:
                return lambda *_: None if times.in_backward else times.begin(part)

            stack.callback(module.register_forward_pre_hook(begin(before), prepend=True).remove)
            stack.callback(module.register_forward_hook(begin(after)).remove)

        def repeated(part: str) -> Callable[..., None]:
            return lambda *_: times.begin(part) if times.in_backward else None

        around(policy, "layers, rest", "head and loss")
        around(policy.model.lm_head, "head and loss", "head and loss")
        for layer in policy.model.model.layers:
            around(layer.self_attn, "attention", "layers, rest")
            for module in layer.modules():
                if spec_of(module) is not None:
                    around(module, "routers", "layers, rest")
                elif hasattr(module, "replayed_router"):
                    around(module, "experts", "layers, rest")
            before = layer.register_forward_pre_hook(repeated("repeated forward"), prepend=True)
            # A forward that is repeated ends by an exception once backward has what it needs.
            after = layer.register_forward_hook(repeated("backward"), always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        _around_updates(times, learner.optimizer, stack)
        stack.enter_context(mock.patch.object(Tensor, "backward", _backward(times)))
        for name in READS:
            read = _read(times, getattr(Tensor, name))
            stack.enter_context(mock.patch.object(Tensor, name, read))
        times.begin("other")
        yield times
        times.begin("other")


def _around_updates(times: PartTimes, optimizer: Any, stack: ExitStack) -> None:
    before = optimizer.register_step_pre_hook(lambda *_: times.begin("optimizer"))
    after = optimizer.register_step_post_hook(lambda *_: times.begin("other"))
    stack.callback(before.remove)
    stack.callback(after.remove)


def _backward(times: PartTimes) -> Callable[..., None]:
    """``Tensor.backward`` between marks."""
    run: Callable[..., None] = Tensor.backward

    def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        times.begin("backward")
        times.in_backward = True
        try:
            run(tensor, *args, **kwargs)
        finally:
            times.in_backward = False
            times.begin("other")

    return backward


def _read(times: PartTimes, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reads a tensor's values, between marks; those of the host cost nothing."""

    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if times.in_backward or times.current == "host waits":
            return method(tensor, *args, **kwargs)
        before = times.current
        times.begin("host waits")
        try:
            return method(tensor, *args, **kwargs)
        finally:
            times.begin(before)

    return read


@dataclass(frozen=True)
class StepFloors:
    """Operations and bytes that the parts of a step need at least.

    Operations are those of :class:`~orchestrate_trainer.cost.ForwardCost`. Bytes are weights, read
    once per pack and pass, and a part's inputs and outputs; what a part keeps in between is left
    out, because a kernel may keep it on the chip.
    """

    flops: dict[str, float]
    bytes: dict[str, float]

    @classmethod
    def of(
        cls,
        learner: Learner,
        level: str,
        lengths: list[int],
        scored: int,
        packs: int,
        forwards: int,
    ) -> StepFloors:
        """Floors of a step of ``forwards`` forward passes, one of them with a backward, over
        sequences of ``lengths`` tokens in ``packs`` packs, of which ``scored`` tokens are scored.

        ``level`` is that of activation checkpointing.
        """
        policy = learner.policy
        width, hidden = policy.dtype.itemsize, policy.model.config.hidden_size
        tokens, layers = sum(lengths), len(policy.model.model.layers)
        weights, used = _weights(policy)
        cost: ForwardCost = policy.cost
        each = {part: 2 * number * tokens for part, number in used.items()}
        each["attention"] += sum(cost.sequence(n) - cost.token * n for n in lengths)
        each["head and loss"] = cost.head * scored
        # A residual stream is read and written by attention, experts, and two norms.
        moved = {part: float(packs * number * width) for part, number in weights.items()}
        moved["head and loss"] += scored * hidden * width
        stream = 2 * hidden * width * tokens * layers
        for part, times in (("attention", 1), ("experts", 1), ("layers, rest", 2)):
            moved[part] += times * stream
        moved["routers"] += stream / 2
        flops = {part: forwards * number for part, number in each.items()}
        held = {part: forwards * number for part, number in moved.items()}
        flops["backward"] = 2 * sum(each.values())
        # Gradients are written in the compute dtype, and summed in float32.
        held["backward"] = sum(moved.values()) + packs * sum(weights.values()) * (width + 4)
        if level == "full":
            again = {part: n for part, n in each.items() if part != "head and loss"}
            # Not the last of an expert's three products.
            flops["repeated forward"] = sum(again.values()) - again["experts"] / 3
        local = sum(_local(parameter).numel() for parameter in policy.parameters())
        moments = sum(
            tensor.element_size()
            for tensor in next(iter(learner.optimizer.state.values()), {}).values()
            if isinstance(tensor, Tensor) and tensor.dim()
        )
        # Weights and moments are read and written, the gradient is read.
        held["optimizer"] = local * (2 * (4 + (moments or 8)) + 4)
        return cls(flops, held)

    def seconds(self, part: str, peak: float | None, bandwidth: float | None) -> float | None:
        """Least seconds of a part at a device's peak in FLOP/s and bytes/s, if they are known."""
        if peak is None or bandwidth is None:
            return None
        return max(self.flops.get(part, 0.0) / peak, self.bytes.get(part, 0.0) / bandwidth)


def _weights(policy: Policy) -> tuple[dict[str, int], dict[str, float]]:
    """Number of weights by part of a forward pass, and of those that a token uses."""
    share = policy.routing.spec.top_k / policy.routing.spec.experts
    head = policy.model.get_output_embeddings().weight
    embedding = policy.model.get_input_embeddings().weight
    parts = ("attention", "routers", "experts", "layers, rest", "head and loss")
    weights, used = dict.fromkeys(parts, 0), dict.fromkeys(parts, 0.0)
    routers = {id(parameter) for parameter in policy.routing.parameters()}
    for name, parameter in policy.model.named_parameters():
        if parameter is head:
            weights["head and loss"] += parameter.numel()
        elif parameter is not embedding and parameter.dim() > 1 and not name.endswith("bias"):
            part = "layers, rest"
            if id(parameter) in routers:
                part = "routers"
            elif ".experts." in name:
                part = "experts"
            elif ".self_attn." in name:
                part = "attention"
            weights[part] += parameter.numel()
            used[part] += parameter.numel() * (share if part == "experts" else 1.0)
    return weights, used


def table(parts: dict[str, Any]) -> list[str]:
    """Lines of a table in Markdown of a report's ``parts``."""
    lines = [
        f"A step with marks between its parts takes {parts['seconds']:.3f} s "
        f"({parts['repetitions']}×). The least is the larger of operations and bytes at the "
        "device's peak.",
        "",
        "| part | seconds | share | least | comprises |",
        "|---|---|---|---|---|",
    ]
    for name, row in parts["rows"].items():
        least = "-" if row["least_seconds"] is None else f"{row['least_seconds']:.4f}"
        lines.append(
            f"| {name} | {row['seconds']:.4f} | {row['share']:.1%} | {least} | {PARTS[name]} |"
        )
    return lines


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
