"""Counts how often the host waits for the device, which each time leaves the device without work.

On CUDA, PyTorch itself reports its synchronising operations. Elsewhere they are found by what they
do: tensors that :func:`~orchestrate_trainer.data.on_device` moved, parameters, and whatever is
computed from them count as being on the device, and an operation that needs their values on the
host counts as a wait. So the same step can be checked on a machine without a GPU.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Waits", "count_waits"]

#: Start of the warning that PyTorch gives for each synchronising operation.
WARNING = "called a synchronizing CUDA operation"
#: Operations whose result, or the shape of it, the host needs.
READS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "equal",
}  # fmt: skip
#: Attribute of the tensors that count as being on the device.
MARK = "_counts_as_on_device"
PACKAGE = Path(__file__).parent


class Waits:
    """Waits of the host by what caused them: operation and line of this package."""

    def __init__(self) -> None:
        self.by_cause: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Number of waits."""
        return self.by_cause.total()

    def add(self, operation: str) -> None:
        """Counts a wait at the innermost line of this package."""
        frames = [
            frame
            for frame in traceback.extract_stack()
            if Path(frame.filename).parent == PACKAGE and frame.filename != __file__
        ]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside"
        self.by_cause[f"{operation} at {where}"] += 1


@contextmanager
def count_waits(device: torch.device, held: Iterable[Tensor] = ()) -> Iterator[Waits]:
    """Counts the host's waits for ``device`` inside the context.

    ``held`` are tensors on the device from before, such as parameters and buffers.
    """
    waits = Waits()
    if device.type == "cuda":
        with _warnings_counted(waits):
            yield waits
        return
    for tensor in held:
        _mark(tensor)
    with _FunctionMode(waits), _DispatchMode(waits):
        yield waits


@contextmanager
def _warnings_counted(waits: Waits) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if WARNING in str(warning.message):
            where = f"{Path(warning.filename).name}:{warning.lineno}"
            waits.by_cause[f"synchronisation at {where}"] += 1


class _DispatchMode(TorchDispatchMode):
    """Follows device tensors through PyTorch's operators, including backward."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = any(map(_is_marked, tensors))
        if on_device and _reads(name, args, kwargs):
            self._waits.add(name)
        result = func(*args, **kwargs)
        uploads = name == "_to_copy" and kwargs.get("non_blocking", False)
        if on_device or uploads:
            written = (
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
            for leaf in tree_leaves((result, *written)):
                if isinstance(leaf, Tensor):
                    _mark(leaf)
        return result


class _FunctionMode(TorchFunctionMode):
    """Sees the copies to the host that are not operators when both sides are CPU memory."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        downloads = name in ("tolist", "numpy", "cpu") or (
            name == "to" and not kwargs.get("non_blocking", False) and _names_cpu(args[1:], kwargs)
        )
        if not downloads or not _is_marked(args[0]):
            return func(*args, **kwargs)
        self._waits.add(name)
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            # The copy on the host is another tensor, which may be read.
            return func(args[0].clone(), *args[1:], **kwargs)


def _reads(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator on device tensors needs their values on the host."""
    if name in READS:
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = [index for index in args[1] if index is not None and index.dtype is torch.bool]
        # Writing one value by a mask is a masked fill.
        return bool(masks) and (name == "index" or args[2].numel() != 1)
    return False


def _names_cpu(args: Any, kwargs: dict[str, Any]) -> bool:
    # A `torch.device` may be that of another tensor on the device.
    return any(isinstance(value, str) and value == "cpu" for value in (*args, *kwargs.values()))


def _mark(tensor: Tensor) -> None:
    setattr(tensor, MARK, True)
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:
        setattr(local, MARK, True)


def _is_marked(tensor: Tensor) -> bool:
    if getattr(tensor, MARK, False):
        return True
    return bool(getattr(getattr(tensor, "_local_tensor", None), MARK, False))
