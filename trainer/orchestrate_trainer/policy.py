"""The model being trained: a causal language model of transformers, sharded by FSDP2.

Parameters are stored in float32 and cast to the compute dtype when a layer is gathered. Routers
compute in float32, but on the cast values, which are those of an export in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from . import attention, checkpointing
from .compilation import compile_layers
from .cost import ForwardCost
from .experts import NAME as PACKED_EXPERTS
from .replay import Routing
from .world import World

__all__ = ["ModelError", "ModelOptions", "Policy", "load_policy", "reload_weights", "try_pack"]

#: Largest number of logits computed at a time: 512 MiB in float32.
MAX_LOGITS = 1 << 27


class ModelError(ValueError):
    """A model folder or checkpoint that this trainer cannot use."""


@dataclass(frozen=True)
class ModelOptions:
    """How the model and its optimizer are stored and computed."""

    #: Compute dtype; ``auto`` is bf16 on CUDA and f32 on the CPU.
    compute: Literal["auto", "bf16", "f32"] = "auto"
    #: What of a layer's forward runs again during backward instead of being kept; see
    #: :mod:`orchestrate_trainer.checkpointing`.
    activation_checkpointing: Literal["none", "selective", "full"] = "full"
    #: Keep parameters, gradients and optimizer state in host memory between uses (CUDA only).
    cpu_offload: bool = False
    #: Name of an expert kernel that transformers knows.
    experts: str = PACKED_EXPERTS
    #: Attention kernel; ``auto`` is the best for model, dtype and device.
    attention: Literal["auto", "varlen", "flex", "loop"] = "auto"
    #: Compile decoder layers, if that is possible.
    compile: bool = False
    #: Dtype of the optimizer's moments.
    moments: Literal["f32", "bf16"] = "f32"
    #: Most tokens of a pack in a step. ``request`` is what the request says; ``auto`` is as many as
    #: fit in the free memory of a GPU, and on the CPU ``request``.
    pack_tokens: int | Literal["auto", "request"] = "auto"

    def dtype(self, world: World) -> torch.dtype:
        """The compute dtype on the device of ``world``."""
        if self.compute == "auto":
            return torch.bfloat16 if world.device.type == "cuda" else torch.float32
        return torch.bfloat16 if self.compute == "bf16" else torch.float32


class Policy(nn.Module):
    """A model that computes log-probs with replayed routing."""

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, attention_kernel: str = "loop"
    ) -> None:
        """Wraps ``model`` and replaces its routers; ``dtype`` is the compute dtype, and
        ``attention_kernel`` one of :data:`~orchestrate_trainer.attention.KERNELS`.

        Raises :class:`~orchestrate_trainer.routers.UnknownRouterError`.
        """
        super().__init__()
        self.model: Any = model
        self.dtype = dtype
        self.attention_kernel = attention_kernel
        self.routing = Routing(model)
        #: Operations of a forward pass.
        self.cost = ForwardCost.of(model, self.routing.spec)
        config = model.config
        #: What the trainer and a batch must agree on: the protocol's ``ModelShape``.
        self.shape: dict[str, Any] = {
            "hidden_layers": config.num_hidden_layers,
            "moe_layers": list(self.routing.layers),
            "experts": self.routing.spec.experts,
            "top_k": self.routing.spec.top_k,
            "vocab": config.vocab_size,
            "context": config.max_position_embeddings,
        }

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        lengths: tuple[int, ...],
        rows: Tensor,
        targets: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and final hidden states of scored tokens.

        Returns the log-probs of ``targets`` ``[M]`` after the tokens at ``rows`` ``[M]`` and the
        entropies there, both in nats, float32 ``[M]``, and the final hidden states at ``rows``,
        ``[M, d]``.

        ``tokens`` and ``positions`` are ``[1, T]``: packed sequences of ``lengths`` tokens each,
        with positions counted from 0 in every sequence.
        """
        packing = attention.Packing(lengths, self.attention_kernel, tokens.device)
        hidden = self.model.model(
            input_ids=tokens, position_ids=positions, use_cache=False, packing=packing
        ).last_hidden_state
        picked = hidden[0, rows]
        step = max(1, MAX_LOGITS // self.shape["vocab"])
        parts = [
            checkpoint(self._head, part, target, temperature, use_reentrant=False)
            for part, target in zip(picked.split(step), targets.split(step), strict=True)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies), picked

    def _head(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self.model.lm_head(hidden).float() / temperature
        total = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - total
        with torch.no_grad():
            entropies = total - (F.softmax(logits, dim=-1) * logits).sum(-1)
        return logprobs, entropies


def load_policy(folder: Path, options: ModelOptions, world: World) -> Policy:
    """Loads the model in ``folder`` (Hugging Face layout), sharded over all processes.

    The leader reads it in its stored dtype and distributes one parameter after the other; no other
    process ever holds a whole model.

    Raises :class:`ModelError` or :class:`~orchestrate_trainer.routers.UnknownRouterError`.
    """
    if options.cpu_offload and world.device.type != "cuda":
        raise ModelError("--cpu-offload requires a CUDA device; remove the option")
    if options.compile and options.activation_checkpointing == "selective":
        # What is kept is known by operators, which a compiled layer no longer has.
        raise ModelError(
            "--compile on does not support --activation-checkpointing selective; choose none or "
            "full"
        )
    config = _config(folder)
    source = _read_whole(folder, world)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention.NAME
        )
    skeleton.set_experts_implementation(options.experts)
    dtype = options.dtype(world)
    try:
        kernel = attention.choose_kernel(options.attention, skeleton, dtype, world.device)
    except ValueError as error:
        raise ModelError(f"{error}; choose another --attention") from None
    policy = Policy(skeleton, dtype, kernel)
    _shard(policy, dtype, options, world)
    policy.to_empty(device="cpu" if options.cpu_offload else world.device)
    skeleton.tie_weights()
    if source is not None:
        # Records how experts that are fused in memory are laid out on disk; the export undoes it.
        skeleton._weight_conversions = getattr(source, "_weight_conversions", None)
    _distribute_weights(policy, source, world)
    for module in skeleton.modules():
        # In training mode Mixtral would multiply its routers' inputs by noise.
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.0
    policy.train()
    checkpointing.enable(skeleton, options.activation_checkpointing)
    if options.compile:
        compile_layers(skeleton, lambda: try_pack(policy, world), world)
    return policy


def try_pack(policy: Policy, world: World) -> None:
    """Runs what a step runs, on a short pack: forward without gradients, forward and backward."""
    # A number of tokens that differs from every width of a model: a compiler takes equal ones
    # for the same.
    lengths = (7, 6)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(world.device)
    tokens = torch.arange(13, device=world.device) % 2
    given = tokens[None], positions[None], lengths, torch.arange(12).to(tokens), tokens[1:], 1.0
    try:
        with torch.no_grad(), policy.routing.micro_batch():
            policy(*given)
        with policy.routing.micro_batch():
            policy(*given)[0].sum().backward()
    finally:
        policy.zero_grad(set_to_none=True)


def reload_weights(policy: Policy, folder: Path, world: World) -> None:
    """Replaces the policy's weights by those in ``folder``. Raises :class:`ModelError`."""
    _distribute_weights(policy, _read_whole(folder, world), world)


def _config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: no model configuration found: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{folder}: quantised weights cannot be trained; convert them to bf16")
    # The sampler has no dropout, so the trainer must not either.
    config.attention_dropout = 0.0
    config.use_cache = False
    return config


def _read_whole(folder: Path, world: World) -> PreTrainedModel | None:
    """The whole model in the leader, ``None`` elsewhere. Raises :class:`ModelError` in all
    processes."""
    model: PreTrainedModel | None = None
    problem: str | None = None
    if world.is_leader:
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype="auto",
                local_files_only=True,
                attn_implementation="eager",
                output_loading_info=True,
            )
            model, report = loaded
            lacking = sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])})
            if lacking:
                problem = f"tensor `{lacking[0]}` is missing or has the wrong shape"
        except (OSError, ValueError, RuntimeError) as error:
            problem = str(error)
    problem = world.broadcast(problem)
    if problem is not None:
        raise ModelError(f"{folder}: {problem}")
    return model


def _shard(policy: Policy, dtype: torch.dtype, options: ModelOptions, world: World) -> None:
    settings: dict[str, Any] = {
        "mesh": world.mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtype is torch.float32 else dtype, reduce_dtype=torch.float32
        ),
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
    }
    for layer in policy.model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(policy, **settings)


@torch.no_grad()
def _distribute_weights(policy: Policy, source: PreTrainedModel | None, world: World) -> None:
    """Copies the leader's parameters and buffers to all processes, one at a time, converting their
    dtype."""
    given = {} if source is None else dict(source.named_parameters())
    for name, parameter in policy.model.named_parameters():
        if world.is_leader:
            whole = given[name].to(world.device, torch.float32)
        else:
            whole = torch.empty(parameter.shape, dtype=torch.float32, device=world.device)
        sharded = distribute_tensor(whole, world.mesh, parameter.placements)
        parameter.to_local().copy_(sharded.to_local())
    buffers = {} if source is None else dict(source.named_buffers())
    for name, buffer in policy.model.named_buffers():
        if world.is_leader:
            buffer.copy_(buffers[name].to(buffer.device, buffer.dtype))
        on_device = buffer.to(world.device)
        dist.broadcast(on_device, src=0)
        buffer.copy_(on_device)
