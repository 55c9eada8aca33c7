"""Attention kernels agree on packed sequences: outputs, gradients, windows and sinks.

Like ``test_gpu.py`` this module needs PyTorch and transformers only.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

for package in ("torch", "transformers"):
    pytest.importorskip(package, reason=f"package {package} is not installed: scripts/test-python")

import torch  # isort: skip  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from orchestrate_trainer.attention import (  # noqa: E402
    KERNELS,
    Packing,
    choose_kernel,
    obstacle,
    packed_attention,
)

LENGTHS = (9, 1, 33, 5)
CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
windows = pytest.mark.parametrize("window", [None, 1, 6, 100])


def computed(
    kernel: str,
    lengths: tuple[int, ...],
    *,
    window: int | None = None,
    sinks: bool = False,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> list[torch.Tensor]:
    """Output of a kernel on random inputs, and the gradients of a weighted sum of it where the
    kernel has a backward."""
    draw = torch.Generator().manual_seed(0)
    tokens = sum(lengths)

    trains = kernel != "flex" or device.type == "cuda"

    def drawn(*shape: int) -> torch.Tensor:
        # The same values in every type.
        values = torch.randn(shape, generator=draw).bfloat16().to(device, dtype)
        return values.requires_grad_(trains)

    # As in transformers, where heads come before tokens only by a transposed view.
    query = drawn(1, tokens, heads[0], widths[0])
    key = drawn(1, tokens, heads[1], widths[0])
    value = drawn(1, tokens, heads[1], widths[1])
    inputs = [query, key, value]
    if sinks:
        inputs.append(drawn(heads[0]))
    weights = torch.randn(1, tokens, heads[0], widths[1], generator=draw)
    weights = weights.bfloat16().to(device, dtype)
    output, _ = packed_attention(
        nn.Module(),
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        packing=Packing(lengths, kernel, device),
        sliding_window=window,
        s_aux=inputs[3] if sinks else None,
    )
    assert output.shape == weights.shape and output.is_contiguous()
    if trains:
        (output * weights).sum().backward()
    return [output.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


def agree(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float) -> None:
    """Compares by the error's norm over the norm of the value. In a window of one token the
    gradients of queries and keys are 0 but for rounding, so values below 0.001 count as 0.001."""
    assert len(found) == len(wanted)
    for one, two in zip(found, wanted, strict=True):
        norm = max(float(two.float().norm()), 1e-3 * two.numel() ** 0.5)
        assert float((one.float() - two.float()).norm()) / norm <= tolerance


@windows
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("widths", [(16, 16), (24, 8)], ids=["one width", "two widths"])
def test_flex_equals_the_loop(window: int | None, sinks: bool, widths: tuple[int, int]) -> None:
    given: dict[str, Any] = {"window": window, "sinks": sinks, "widths": widths}
    agree(computed("flex", LENGTHS, **given), computed("loop", LENGTHS, **given)[:1], 1e-5)


@pytest.mark.parametrize("kernel", ["flex", "loop"])
def test_no_sequence_sees_another(kernel: str) -> None:
    whole = computed(kernel, (9, 7))[0]
    alone = computed("loop", (16,))[0]
    torch.testing.assert_close(whole[:, :9], alone[:, :9], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(whole[:, 9:], alone[:, 9:], atol=1e-2)


class Largest(TorchDispatchMode):
    """Finds the number of elements of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("widths", [(16, 16), (24, 8), (8, 24)], ids=str)
def test_no_tensor_has_a_value_per_pair_of_tokens(
    window: int | None, sinks: bool, widths: tuple[int, int]
) -> None:
    """Neither of a sequence nor of a pack, forward or backward."""
    given: dict[str, Any] = {"window": window, "sinks": sinks, "widths": widths, "heads": (4, 2)}
    with Largest() as largest:
        computed("loop", (1024, 1), **given)
    # Padded queries of all heads, with the sink's extra dimensions; a mask of a block is smaller.
    assert largest.elements <= 4 * 1025 * (24 + 8) < 1024**2 / 4


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300, 5000])
@pytest.mark.parametrize(
    "lengths",
    [(1,), (128,), (384,), (1000,), (9, 1, 33, 5), (128, 256, 1), (127, 130, 500, 3), (300,) * 5],
    ids=str,
)
def test_block_mask_equals_that_of_pytorch(lengths: tuple[int, ...], window: int | None) -> None:
    tokens = sum(lengths)
    with Largest() as largest:
        found = Packing(lengths, "flex", CPU).block_mask(window)
    # Not a value for every pair of tokens.
    assert largest.elements <= tokens + (tokens // 128 + 2) ** 2
    wanted = create_block_mask(found.mask_mod, None, None, tokens, tokens, device="cpu")
    assert found.shape == wanted.shape and found.BLOCK_SIZE == wanted.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        for kind in ("num_blocks", "indices"):
            one, two = (getattr(mask, f"{name}_{kind}") for mask in (found, wanted))
            assert torch.equal(one, two) and one.dtype == two.dtype, name


def naive(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, sink: float
) -> torch.Tensor:
    """Attention of one head by its definition, float64 ``[T, D_v]``."""
    scores = query.double() @ key.double().T * query.shape[-1] ** -0.5
    position = torch.arange(len(query))
    distance = position[:, None] - position
    hidden = (distance < 0) | (distance >= (window or len(query)))
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    return (weights @ value.double()) / (weights.sum(-1, keepdim=True) + math.exp(sink))


@pytest.mark.parametrize("window", [None, 1, 6, 128, 150, 400])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("widths", [(16, 16), (24, 8), (8, 24)], ids=str)
def test_the_loop_equals_the_definition(
    window: int | None, sinks: bool, widths: tuple[int, int]
) -> None:
    """Also where a window spans several blocks of queries."""
    draw = torch.Generator().manual_seed(0)
    lengths = (300, 7)
    query, key = (torch.randn(1, 1, 307, widths[0], generator=draw) for _ in range(2))
    value = torch.randn(1, 1, 307, widths[1], generator=draw)
    output, _ = packed_attention(
        nn.Module(),
        query,
        key,
        value,
        None,
        packing=Packing(lengths, "loop", CPU),
        sliding_window=window,
        s_aux=torch.tensor([0.5]) if sinks else None,
    )
    parts = (tensor[0, 0].split(lengths) for tensor in (query, key, value))
    sink = 0.5 if sinks else -math.inf
    wanted = [naive(q, k, v, window, sink) for q, k, v in zip(*parts, strict=True)]
    torch.testing.assert_close(output[0, :, 0].double(), torch.cat(wanted), rtol=1e-5, atol=1e-5)


def shape(head: int = 128, **changed: Any) -> Any:
    """What is read of a model to choose its kernel."""
    layer = SimpleNamespace(self_attn=SimpleNamespace(head_dim=head, **changed))
    return SimpleNamespace(model=SimpleNamespace(layers=[layer]))


def test_kernel_is_chosen_by_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, bf16 = torch.device("cuda", 0), torch.bfloat16
    assert choose_kernel("auto", shape(), torch.float32, CPU) == "loop"
    with pytest.raises(ValueError, match="`varlen`: varlen attention requires a CUDA device"):
        choose_kernel("varlen", shape(), bf16, CPU)
    capability, triton = (9, 0), True
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: triton)
    assert choose_kernel("auto", shape(), bf16, cuda) == "varlen"
    assert choose_kernel("loop", shape(), bf16, cuda) == "loop"
    for model, dtype, problem in (
        (shape(), torch.float32, "bf16 or f16"),
        (shape(sinks=1), bf16, "no attention sinks"),
        (shape(qk_head_dim=192, v_head_dim=128), bf16, "one width"),
        (shape(512), bf16, "one width"),
    ):
        assert problem in (obstacle("varlen", model, dtype, cuda) or "")
        assert choose_kernel("auto", model, dtype, cuda) == "flex"
    triton = False
    assert choose_kernel("auto", shape(sinks=1), bf16, cuda) == "loop"
    with pytest.raises(ValueError, match=r"`flex`: .* Triton"):
        choose_kernel("flex", shape(), bf16, cuda)
    capability = (7, 5)
    assert choose_kernel("auto", shape(), bf16, cuda) == "loop"
    with pytest.raises(ValueError, match="choose one of varlen, flex, loop"):
        choose_kernel("paged", shape(), bf16, cuda)
    assert KERNELS == ("varlen", "flex", "loop")


@needs_gpu
@windows
@pytest.mark.parametrize("lengths", [LENGTHS, (700, 3, 1500)], ids=["short", "long"])
@pytest.mark.parametrize("kernel", ["varlen", "flex", "loop"])
def test_kernels_agree_on_the_gpu(
    kernel: str, lengths: tuple[int, ...], window: int | None
) -> None:
    """In bf16 a value has 8 bits, so errors of 1 % are rounding."""
    given: dict[str, Any] = {"window": window, "heads": (8, 2), "widths": (128, 128)}
    wanted = computed("loop", lengths, **given)
    device = torch.device("cuda", 0)
    found = computed(kernel, lengths, dtype=torch.bfloat16, device=device, **given)
    agree([tensor.cpu() for tensor in found], wanted, 1e-2)


@needs_gpu
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_flex_equals_the_loop_on_the_gpu(sinks: bool) -> None:
    given: dict[str, Any] = {"sinks": sinks, "heads": (8, 2), "widths": (64, 64), "window": 128}
    wanted = computed("loop", (700, 3, 1500), **given)
    device = torch.device("cuda", 0)
    found = computed("flex", (700, 3, 1500), dtype=torch.bfloat16, device=device, **given)
    agree([tensor.cpu() for tensor in found], wanted, 1e-2)
