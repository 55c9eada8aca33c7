"""The model under training: a causal language model of transformers, sharded by FSDP2.

Parameters are float32 wherever they lie and are cast to the compute dtype when a layer is gathered,
so that routers, in float32, see the values that an export in that dtype carries.
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

from . import attention
from .replay import Routing
from .world import World

__all__ = ["ModelOptions", "Policy", "UnusableModel", "load_policy", "refill"]

#: Logits computed at a time, in values: 512 MiB in float32.
LOGITS_AT_ONCE = 1 << 27


class UnusableModel(ValueError):
    """A model folder that this trainer cannot train."""


@dataclass(frozen=True)
class ModelOptions:
    """How the model is held and computed."""

    compute: Literal["auto", "bf16", "f32"] = "auto"
    #: Run each layer's forward again in backward instead of keeping its activations.
    activation_checkpointing: bool = True
    #: Keep parameters, gradients and optimizer state in host memory between uses (CUDA only).
    cpu_offload: bool = False
    #: Kernel of the experts, as transformers names it; ``None`` = its own choice.
    experts: str | None = None

    def dtype(self, world: World) -> torch.dtype:
        """The compute dtype: by default bf16 on CUDA, f32 on the CPU."""
        if self.compute == "auto":
            return torch.bfloat16 if world.device.type == "cuda" else torch.float32
        return torch.bfloat16 if self.compute == "bf16" else torch.float32


class Policy(nn.Module):
    """Log-probs of a model with replayed routing."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.routing = Routing(model)
        config = model.config
        #: What trainer and batch must agree on, in the words of the protocol.
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
        """Log-probs and entropies, nats, float32 ``[M]``, of ``targets`` ``[M]`` after the tokens
        at ``rows`` ``[M]``, and the final hidden states there, ``[M, d]``.

        ``tokens`` and ``positions`` are ``[1, T]``: packed sequences of ``lengths`` tokens each,
        positions counting from 0 in every one.
        """
        hidden = self.model.model(
            input_ids=tokens, position_ids=positions, use_cache=False, packed_lengths=lengths
        ).last_hidden_state
        picked = hidden[0, rows]
        step = max(1, LOGITS_AT_ONCE // self.shape["vocab"])
        parts = [
            checkpoint(self._head, part, target, temperature, use_reentrant=False)
            for part, target in zip(picked.split(step), targets.split(step))
        ]
        logprobs, entropies = zip(*parts)
        return torch.cat(logprobs), torch.cat(entropies), picked

    def _head(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self.model.lm_head(hidden).float() / temperature
        total = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - total
        with torch.no_grad():
            entropies = total - (F.softmax(logits, dim=-1) * logits).sum(-1)
        return logprobs, entropies


def load_policy(folder: Path, options: ModelOptions, world: World) -> Policy:
    """The model in ``folder`` (Hugging Face layout), sharded over all processes.

    The leader reads it in its stored dtype and hands every parameter out in turn; no other process
    ever holds a whole model.

    Raises :class:`UnusableModel` or :class:`~orchestrate_trainer.routers.UnknownRouter`.
    """
    if options.cpu_offload and world.device.type != "cuda":
        raise UnusableModel("CPU offload needs a CUDA device: leave --cpu-offload out")
    config = _config(folder)
    source = _read(folder, world)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention.NAME
        )
    if options.experts is not None:
        skeleton.set_experts_implementation(options.experts)
    dtype = options.dtype(world)
    policy = Policy(skeleton, dtype)
    _shard(policy, dtype, options, world)
    policy.to_empty(device="cpu" if options.cpu_offload else world.device)
    skeleton.tie_weights()
    if source is not None:
        # Says how experts fused in memory lie on disk, which the export has to undo.
        skeleton._weight_conversions = getattr(source, "_weight_conversions", None)
    _fill(policy, source, world)
    for module in skeleton.modules():
        # Mixtral multiplies its routers' inputs by noise in training.
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.0
    policy.train()
    if options.activation_checkpointing:
        skeleton.gradient_checkpointing_enable({"use_reentrant": False})
    return policy


def refill(policy: Policy, folder: Path, world: World) -> None:
    """Puts the weights of ``folder`` back into the policy."""
    _fill(policy, _read(folder, world), world)


def _config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnusableModel(f"{folder}: no configuration of a model here: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise UnusableModel(
            f"{folder}: its weights are quantised and cannot be trained: convert them to bf16"
        )
    # Trained as published: no regularisation that the sampler does not have.
    config.attention_dropout = 0.0
    config.use_cache = False
    return config


def _read(folder: Path, world: World) -> PreTrainedModel | None:
    """The whole model, in the leader. Raises :class:`UnusableModel` everywhere."""
    model = problem = None
    if world.leads:
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype="auto",
                local_files_only=True,
                attn_implementation="eager",
                output_loading_info=True,
            )
            lacking = sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])})
            if lacking:
                problem = f"tensor `{lacking[0]}` is missing or misshapen"
        except (OSError, ValueError, RuntimeError) as error:
            problem = str(error)
    problem = world.share(problem)
    if problem is not None:
        raise UnusableModel(f"{folder}: {problem}")
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
def _fill(policy: Policy, source: PreTrainedModel | None, world: World) -> None:
    """Hands out the leader's parameters and buffers, one at a time, whatever dtype they have."""
    given = {} if source is None else dict(source.named_parameters())
    for name, parameter in policy.model.named_parameters():
        if world.leads:
            whole = given[name].to(world.device, torch.float32)
        else:
            whole = torch.empty(parameter.shape, dtype=torch.float32, device=world.device)
        dealt = distribute_tensor(whole, world.mesh, parameter.placements)
        parameter.to_local().copy_(dealt.to_local())
    buffers = {} if source is None else dict(source.named_buffers())
    for name, buffer in policy.model.named_buffers():
        if world.leads:
            buffer.copy_(buffers[name].to(buffer.device, buffer.dtype))
        on_device = buffer.to(world.device)
        dist.broadcast(on_device, src=0)
        buffer.copy_(on_device)
