"""How many tokens a pack may have, from the memory that is free on the device.

The bytes per token are an estimate from the model's shape: what autograd keeps of each layer, which
depends on the level of activation checkpointing, and what one layer needs while its backward runs.
The output head is computed in chunks, so its share is bounded. ``tests/train/test_pack_size.py``
compares the estimate with the bytes that are alive on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .cost import head_widths
from .policy import MAX_LOGITS, ModelError, ModelOptions, Policy
from .world import World

__all__ = [
    "ActivationSize",
    "PackLimit",
    "free_bytes",
    "measure_limit",
    "reserved_bytes",
    "weight_bytes",
]

#: Share of the free memory that packs are sized for; the rest is for fragments and for what the
#: estimate leaves out.
USED = 0.85
#: Elements of the largest tensor: some kernels index with 32 bits.
MAX_ELEMENTS = 2**31 - 1
#: Layers whose parameters are gathered, and whose gradients are reduced, at a time.
GATHERED_LAYERS = 2


@dataclass(frozen=True)
class ActivationSize:
    """Estimate of the memory that activations take. Widths are numbers of values per token."""

    layers: int
    #: Width of the residual stream.
    hidden: int
    #: Widths of all heads' queries, keys and values.
    queries: int
    keys: int
    values: int
    #: Width of all heads' outputs.
    outputs: int
    #: Whether each head's queries and keys are normalised.
    normed_heads: bool
    #: Whether attention has sinks, for which ``loop`` copies queries, keys and values.
    sinks: bool
    experts: int
    top_k: int
    #: Inner width of an expert.
    expert_width: int
    #: Values of this width that autograd keeps: gate and value, what the activation computes from
    #: them, and their product with and without the token's weight.
    expert_copies: int
    #: Inner width of shared experts, or what a dense layer has beyond ``top_k`` experts.
    dense_width: int
    vocab: int
    #: Bytes of a value in the compute dtype.
    width: int
    #: Level of activation checkpointing.
    level: str

    @classmethod
    def of(cls, policy: Policy, level: str) -> ActivationSize:
        """The estimate for a policy, whose parameters may be on the meta device."""
        model, spec = policy.model, policy.routing.spec
        layers = list(model.model.layers)
        attention = layers[0].self_attn
        heads = model.config.num_attention_heads
        key, value = head_widths(attention)
        # With latent attention every head has keys and values of its own.
        grouped = heads if hasattr(attention, "kv_a_proj_with_mqa") else _key_heads(model.config)
        experts = spec.experts * model.config.hidden_size
        expert_width = max(_expert_weights(layer) // experts for layer in layers)
        routed = spec.top_k * expert_width
        return cls(
            layers=len(layers),
            hidden=model.config.hidden_size,
            queries=heads * key,
            keys=grouped * key,
            values=grouped * value,
            outputs=heads * value,
            normed_heads=hasattr(attention, "q_norm"),
            sinks=hasattr(attention, "sinks"),
            experts=spec.experts,
            top_k=spec.top_k,
            expert_width=expert_width,
            # gpt-oss also limits gate and value, and shifts the value.
            expert_copies=9 if model.config.model_type == "gpt_oss" else 5,
            dense_width=max(max(_dense_width(layer, routed) for layer in layers), 0),
            vocab=policy.shape["vocab"],
            width=policy.dtype.itemsize,
            level=level,
        )

    @property
    def token(self) -> int:
        """Bytes per token of a pack, without the output head."""
        kept = self.kept // self.layers
        # With checkpointing a layer's forward runs again in backward, so one layer keeps all.
        again = 0 if self.level == "none" else max(self._all - kept, 0)
        # The final norm, the rows that are scored, and their gradient.
        last = (4 + 3 * self.width) * self.hidden
        return self.kept + again + self._working + last + self._routes

    @property
    def kept(self) -> int:
        """Bytes per token that autograd keeps of all layers."""
        each = {"none": self._all, "selective": self._products, "full": self._input}[self.level]
        return self.layers * each

    def head(self, tokens: int) -> int:
        """Bytes of the output head's logits while ``tokens`` tokens are scored, in chunks."""
        rows = min(tokens, max(1, MAX_LOGITS // self.vocab))
        # Logits in the compute dtype; in float32 they, their softmax and their gradients.
        return rows * self.vocab * (self.width + 5 * 4)

    def most_tokens(self, available: int) -> int:
        """Most tokens of a pack whose activations fit in ``available`` bytes, possibly 0."""
        # Either all tokens are scored in one chunk, or the head takes what a chunk does.
        single = self.token + self.head(1)
        within = min(available // single, max(1, MAX_LOGITS // self.vocab))
        chunked = (available - self.head(MAX_LOGITS)) // self.token
        return max(within, chunked, 0)

    @property
    def indexed(self) -> int:
        """Most tokens of a pack for which no tensor has more than :data:`MAX_ELEMENTS`."""
        return MAX_ELEMENTS // (self.top_k * max(self.hidden, 2 * self.expert_width))

    @property
    def _input(self) -> int:
        return self.width * self.hidden

    @property
    def _products(self) -> int:
        """What ``selective`` keeps of a layer: results of products and attention."""
        projected = self.queries + self.keys + self.values + self.outputs + self.hidden
        experts = 2 * self.top_k * self.expert_width
        dense = 2 * self.dense_width + (self.hidden if self.dense_width else 0)
        return self._input + self.width * (projected + experts + dense) + 4 * self.experts

    @property
    def _all(self) -> int:
        """What autograd keeps of a layer without checkpointing."""
        width, hidden = self.width, self.hidden
        # A norm keeps its input in float32 and what it scales; the router a copy in float32.
        norms = 2 * (4 + width) * hidden + 4 * hidden
        attention = hidden + self.queries + self.keys + self.values + 2 * self.outputs
        attention += 3 * self.queries if self.sinks else 0
        heads = (4 + width) * (self.queries + self.keys) if self.normed_heads else 0
        # With the copied rows.
        experts = self.top_k * (hidden + self.expert_copies * self.expert_width)
        dense = 4 * self.dense_width + (hidden if self.dense_width else 0)
        router = 2 * 4 * self.experts + 8 * 4 * self.top_k
        return norms + width * (attention + experts + dense) + heads + router

    @property
    def _working(self) -> int:
        """What the experts of one layer need besides while they are computed or differentiated."""
        return self.width * self.top_k * (2 * self.hidden + 2 * self.expert_width)

    @property
    def _routes(self) -> int:
        """Recorded, executed and chosen experts of all layers, and the pack's own tensors."""
        narrow = 1 if self.experts <= 256 else 2
        return self.layers * self.top_k * (2 * narrow + 2 * 8) + 64


@dataclass(frozen=True)
class PackLimit:
    """How many tokens fit in the memory of the device that has the least."""

    #: Bytes for a pack, after all that does not depend on it.
    free: int
    size: ActivationSize
    #: What frees memory, of what is not in use.
    remedies: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens of a pack. 0 if there is no room."""
        return min(self.size.most_tokens(int(self.free * USED)), self.size.indexed)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is tried. It uses the margin too."""
        return self.size.most_tokens(self.free)

    def without(self, taken: int) -> PackLimit:
        """The limit when ``taken`` bytes are used for something else."""
        return PackLimit(self.free - taken, self.size, self.remedies)

    def problem(self, longest: int) -> str | None:
        """Why a batch whose longest sequence has ``longest`` tokens cannot run, or ``None``."""
        if longest <= self.longest:
            return None
        return (
            f"the longest sequence has {longest} tokens, but the device has room for "
            f"{self.longest} ({self}); {self.advice}, shorten the episodes, or try it with "
            f"--pack-tokens {longest}"
        )

    @property
    def advice(self) -> str:
        """What to do if there is not enough room."""
        return "use " + " or ".join([", ".join(self.remedies), "more GPUs"][not self.remedies :])

    def __str__(self) -> str:
        """Free memory and bytes per token."""
        return (
            f"{self.free / 2**30:.1f} GiB free after model and optimizer, "
            f"{self.size.token:,} bytes per token"
        )


def measure_limit(
    policy: Policy, optimizer: torch.optim.Optimizer, options: ModelOptions, world: World
) -> PackLimit | None:
    """The limit of all processes, once model and optimizer are where they stay; ``None`` on the
    CPU.

    Raises :class:`~orchestrate_trainer.policy.ModelError` in all processes if nothing fits.
    """
    free = free_bytes(world.device)
    if free is not None:
        free -= reserved_bytes(policy, optimizer, options)
    found = world.gather(free)
    if any(each is None for each in found):
        return None
    size = ActivationSize.of(policy, options.activation_checkpointing)
    limit = PackLimit(min(found), size, _remedies(options))
    if limit.tokens < 1:
        raise ModelError(f"the device has no room for a pack ({limit}); {limit.advice}")
    return limit


def free_bytes(device: torch.device) -> int | None:
    """Free memory of ``device``; ``None`` if it is not a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def reserved_bytes(policy: Policy, optimizer: torch.optim.Optimizer, options: ModelOptions) -> int:
    """Bytes of the device that a step needs besides activations, and that are not in use yet.

    They are gradients, moments of an optimizer that has made no update, and parameters that are
    gathered for a layer, with their gradients before they are reduced.
    """
    parameters = list(policy.parameters())
    local = sum(_local(parameter).numel() for parameter in parameters)
    held = 0
    if not options.cpu_offload:
        moments = 4 if options.moments == "bf16" else 8
        held = local * (4 + (0 if optimizer.state else moments))
    layers: list[int] = [
        sum(p.numel() for p in layer.parameters()) for layer in policy.model.model.layers
    ]
    outside = sum(parameter.numel() for parameter in parameters) - sum(layers)
    width = policy.dtype.itemsize
    # Weights and gradients in the compute dtype, and gradients in float32 to be reduced.
    return held + (outside + GATHERED_LAYERS * max(layers)) * (2 * width + 4)


def weight_bytes(policy: Policy, options: ModelOptions) -> int:
    """Bytes of the device that another copy of the policy's weights takes."""
    if options.cpu_offload:
        return 0
    return sum(_local(parameter).nbytes for parameter in policy.parameters())


def _remedies(options: ModelOptions) -> tuple[str, ...]:
    found = []
    if options.activation_checkpointing != "full":
        found.append("--activation-checkpointing full")
    if options.moments != "bf16" and not options.cpu_offload:
        found.append("--moments bf16")
    if not options.cpu_offload:
        found.append("--cpu-offload")
    return tuple(found)


def _key_heads(config: Any) -> int:
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads


def _expert_weights(layer: nn.Module) -> int:
    """Number of weights in the last products of a layer's experts, 0 in a dense layer."""
    named = layer.named_parameters()
    return sum(p.numel() for name, p in named if name.endswith("experts.down_proj"))


def _dense_width(layer: nn.Module, routed: int) -> int:
    """Inner width of a layer's shared experts; of a dense layer, what exceeds ``routed``."""
    dense = sum(len(p) for name, p in layer.named_parameters() if name.endswith("up_proj.weight"))
    return dense if _expert_weights(layer) else dense - routed


def _local(tensor: Any) -> Tensor:
    """This process's part of a parameter."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
