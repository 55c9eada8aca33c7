"""Counts how often the host waits for the device, which each time leaves the device without work.

On CUDA, PyTorch itself reports its synchronising operations. Elsewhere they are found by what they
do: ``cpu:0`` (:func:`counted_device`) stands for the device and ``cpu`` for the host. Tensors that
were made on or moved to ``cpu:0``, parameters, and whatever is computed from them count as being on
the device. An operation that needs their values on the host counts as a wait, and so does a copy
between the two that is not asked to be asynchronous. So the same step can be checked on a machine
without a GPU.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Waits", "count_waits", "counted_device"]

#: Start of the warning that PyTorch gives for each synchronising operation.
WARNING = "called a synchronizing CUDA operation"
#: Operations whose result, or the shape of it, the host needs.
READS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "equal", "grouped_mm_fallback",
}  # fmt: skip
#: Functions that make a tensor from numbers of the host.
MADE_FROM_HOST = {"tensor", "as_tensor", "asarray", "new_tensor"}
#: Stands for the device where there is no GPU. PyTorch takes it for the CPU, but it differs from
#: ``torch.device("cpu")``.
STAND_IN = torch.device("cpu", 0)
DEVICE_OF_TENSOR = Tensor.device.__get__
#: Attribute of the tensors that count as being on the device.
MARK = "_counts_as_on_device"
PACKAGE = Path(__file__).parent
PYTORCH = str(Path(torch.__file__).parent)


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


def counted_device(device: torch.device) -> torch.device:
    """The device to pass to the code whose waits are counted: on the CPU one that stands for the
    device and can be told from the host."""
    return device if device.type == "cuda" else STAND_IN


@contextmanager
def count_waits(device: torch.device, held: Iterable[Tensor] = ()) -> Iterator[Waits]:
    """Counts the host's waits for ``device`` inside the context.

    The counted code must use :func:`counted_device` of it. ``held`` are tensors on the device from
    before, such as parameters and buffers.
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
        # A copy leaves its target where it is.
        if (on_device and name != "copy_") or uploads:
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
    """Sees what is not an operator when both sides are CPU memory: where a tensor is, what is made
    on the device, and copies between it and the host."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # PyTorch's own code also asks for devices in C++, where a tensor has no stand-in.
        stands_in = not sys._getframe(1).f_code.co_filename.startswith(PYTORCH)
        if func == DEVICE_OF_TENSOR:
            return STAND_IN if stands_in and _is_marked(args[0]) else func(*args, **kwargs)
        moved = name == "to" and stands_in and _names(_on_host, args, kwargs)
        if moved or name in ("tolist", "numpy", "cpu"):
            return self._download(name, func, args, kwargs)
        result = func(*args, **kwargs)
        if _names(_on_stand_in, args, kwargs):
            moved = name == "to" and not _is_marked(args[0]) and not _asynchronous(kwargs)
            if moved or name in MADE_FROM_HOST:
                self._waits.add(name)
            if isinstance(result, Tensor):
                _mark(result)
        return result

    def _download(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Copies a tensor to the host."""
        if not _is_marked(args[0]) or (name == "to" and _asynchronous(kwargs)):
            return func(*args, **kwargs)
        self._waits.add(name)
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            # The copy on the host is another tensor, which may be read.
            return func(args[0].clone(), *args[1:], **kwargs)


def _reads(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator on device tensors makes the host wait."""
    if name in READS:
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "copy_":
        asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return _is_marked(args[0]) != _is_marked(args[1]) and not asynchronous
    if name == "_grouped_mm":
        # Only the kernel of bf16 leaves the groups' bounds on the device.
        return args[0].dtype is not torch.bfloat16
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = [index for index in args[1] if index is not None and index.dtype is torch.bool]
        # Writing one value by a mask is a masked fill.
        return bool(masks) and (name == "index" or args[2].numel() != 1)
    return False


def _names(test: Callable[[object], bool], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether ``test`` holds for a device that a call names."""
    return any(test(value) for value in (*args[1:], kwargs.get("device")))


def _on_host(value: object) -> bool:
    return isinstance(value, str | torch.device) and torch.device(value) == torch.device("cpu")


def _on_stand_in(value: object) -> bool:
    return isinstance(value, torch.device) and value == STAND_IN


def _asynchronous(kwargs: dict[str, Any]) -> bool:
    """Whether a call of ``Tensor.to`` does not wait for its copy."""
    return bool(kwargs.get("non_blocking", False))


def _mark(tensor: Tensor) -> None:
    setattr(tensor, MARK, True)
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:
        setattr(local, MARK, True)


def _is_marked(tensor: Tensor) -> bool:
    # FSDP makes new objects of the parameters that it gathers.
    if isinstance(tensor, torch.nn.Parameter) or getattr(tensor, MARK, False):
        return True
    return bool(getattr(getattr(tensor, "_local_tensor", None), MARK, False))
