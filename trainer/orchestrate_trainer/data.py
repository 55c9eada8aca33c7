"""A batch as one process trains on it: its part of every mini step, in packed micro-batches."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch import Batch, Sequence

__all__ = [
    "InvalidSequenceError",
    "MicroBatch",
    "OwnSequence",
    "check",
    "distribute",
    "joined",
    "on_device",
    "on_host",
]


class InvalidSequenceError(ValueError):
    """A sequence with values that the model cannot take."""


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy of ``tensor`` on ``device``, without making the host wait for the device's earlier work.

    A tensor that is already on a GPU is returned itself.
    """
    if tensor.device.type != "cpu":
        return tensor.to(device, non_blocking=True)
    if device.type == "cuda" and tensor.numel():
        tensor = tensor.pin_memory()
    # Also a copy from CPU to CPU, so that both kinds of device behave alike.
    return tensor.to(device, non_blocking=True, copy=True)


def on_host(tensor: Tensor) -> Tensor:
    """Copy of ``tensor`` in host memory, complete once the device has done its earlier work.

    The memory is pinned if the tensor is on a GPU, without which the host would wait for the copy.
    """
    pinned = tensor.device.type == "cuda"
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return copied.copy_(tensor, non_blocking=True)


def joined(parts: list[Tensor], device: torch.device) -> Tensor:
    """``parts`` ``[T_i, ...]``, one after the other, on ``device`` like :func:`on_device`."""
    if device.type != "cuda":
        return on_device(torch.cat(parts), device)
    tokens = sum(len(part) for part in parts)
    shape = (tokens, *parts[0].shape[1:])
    # Joined in pinned memory, because pinning a joined tensor would copy it once more.
    pinned = torch.empty(shape, dtype=parts[0].dtype, pin_memory=True)
    return on_device(torch.cat(parts, out=pinned), device)


def distribute(lengths: list[int], parts: int) -> list[list[int]]:
    """Numbers of the sequences of each part, ascending within a part.

    Sequences are distributed longest first, each to the part with the fewest tokens so far.
    """
    totals = [0] * parts
    members: list[list[int]] = [[] for _ in range(parts)]
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        part = totals.index(min(totals))
        totals[part] += lengths[number]
        members[part].append(number)
    return [sorted(numbers) for numbers in members]


def check(sequence: Sequence, shape: dict[str, Any]) -> None:
    """Raises :class:`InvalidSequenceError` if the sequence does not fit a model of ``shape``.

    ``shape`` is that of :attr:`orchestrate_trainer.policy.Policy.shape`.
    """
    name = f"sequence {sequence.index} ({sequence.episode_id})"
    tokens = len(sequence)
    if tokens > shape["context"]:
        context = shape["context"]
        raise InvalidSequenceError(
            f"{name} has {tokens} tokens, more than the model's context of {context}"
        )
    outside = np.flatnonzero(sequence.token_ids >= shape["vocab"])
    if len(outside):
        place, vocab = int(outside[0]), shape["vocab"]
        token = int(sequence.token_ids[place])
        raise InvalidSequenceError(
            f"{name}: token id {token} at position {place} is outside the vocabulary of {vocab}"
        )
    scored = sequence.loss_mask == 1
    if not np.isfinite(sequence.rollout_logprobs[scored]).all():
        raise InvalidSequenceError(f"{name}: a rollout log-prob is not finite")
    for what in ("advantage", "reward"):
        if not np.isfinite(getattr(sequence, what)):
            raise InvalidSequenceError(f"{name}: its {what} is not finite")
    for first, rows in sequence.pieces():
        valid = sequence.routing_valid[first : first + len(rows)] == 1
        ordered = np.sort(rows[valid], axis=-1)
        repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        wrong = repeated | (ordered[..., -1] >= shape["experts"])
        if wrong.any():
            row, layer = (int(n) for n in np.argwhere(wrong)[0])
            token = first + int(np.flatnonzero(valid)[row])
            raise InvalidSequenceError(
                f"{name}: routing row of token {token}, layer {sequence.layers[layer]}: ids must "
                f"be distinct and below {shape['experts']}"
            )


@dataclass(frozen=True)
class OwnSequence:
    """A sequence that this process trains on."""

    #: Number in the batch.
    index: int
    advantage: float
    reward: float
    #: int64 ``[T]``
    tokens: Tensor
    #: Log-probs under the sampler, nats, float32 ``[T]``.
    rollout: Tensor
    #: Positions of loss tokens, int64 ``[n]``; never the first token of a sequence.
    scored: Tensor
    #: Recorded experts, uint8 or int16 ``[T, L, K]``: the batch's own memory.
    routes: Tensor
    #: Whether a row was recorded, bool ``[T]``; ``False`` for placeholder rows.
    valid: Tensor

    @classmethod
    def read(cls, batch: Batch, index: int) -> OwnSequence:
        """Reads sequence ``index`` of ``batch``."""
        sequence = batch.sequence(index)
        arrays = sequence.torch()
        masked = arrays["loss_mask"] == 1
        masked[0] = False
        return cls(
            index=index,
            advantage=sequence.advantage,
            reward=sequence.reward,
            tokens=arrays["token_ids"].long(),
            rollout=arrays["rollout_logprobs"],
            scored=masked.nonzero().squeeze(-1),
            routes=arrays["routed_experts"],
            valid=arrays["routing_valid"] == 1,
        )

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


@dataclass
class MicroBatch:
    """Sequences of one forward pass, packed without padding.

    It has ``S`` sequences with ``T`` tokens, ``n`` of which are scored. A process whose sequences
    fill fewer micro-batches than another's adds ones without sequences, so that all run the same
    number of passes.
    """

    sequences: list[OwnSequence]
    #: Score every token but the first of each sequence, not only loss tokens.
    every_token: bool = False
    #: Whether any token is scored. If none is, a placeholder is scored so that all processes run
    #: the same passes; its result must be ignored.
    live: bool = field(init=False)
    #: Token ids, int64 ``[1, T]``.
    tokens: Tensor = field(init=False)
    #: Position of each token in its sequence, int64 ``[1, T]``.
    positions: Tensor = field(init=False)
    #: Tokens of each sequence; they sum to ``T``.
    lengths: tuple[int, ...] = field(init=False)
    #: Row of the token before each scored token, int64 ``[n]``.
    rows: Tensor = field(init=False)
    #: Ids of the scored tokens, int64 ``[n]``.
    targets: Tensor = field(init=False)
    #: Number of the scored token's sequence within the micro-batch, int64 ``[n]``.
    owner: Tensor = field(init=False)
    #: Log-probs of the scored tokens under the sampler, nats, float32 ``[n]``.
    rollout: Tensor = field(init=False)
    #: float32 ``[S]``
    advantages: Tensor = field(init=False)
    #: float32 ``[S]``
    rewards: Tensor = field(init=False)
    #: Number of each token's sequence, int64 ``[T]``.
    member: Tensor = field(init=False)
    #: Whether a token's experts matter to a later one, bool ``[T]``: not of a sequence's last token
    #: nor of the placeholder of a micro-batch without sequences.
    inner: Tensor = field(init=False)
    #: Whether a token's experts were recorded, bool ``[T]``.
    valid: Tensor = field(init=False)
    #: Rows that were not recorded, int64.
    placeholders: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Builds the packed tensors."""
        own = self.sequences
        places: list[Tensor] = []
        owners: list[Tensor] = []
        start = 0
        for number, sequence in enumerate(own):
            scored = self._scored(sequence)
            places.append(scored + start)
            owners.append(torch.full_like(scored, number))
            start += len(sequence)
        self.live = any(len(scored) for scored in places)
        flat = torch.cat([s.tokens for s in own]) if own else torch.zeros(1, dtype=torch.long)
        place, owner = torch.tensor([0]), torch.tensor([0])
        if self.live:
            place, owner = torch.cat(places), torch.cat(owners)
        self.lengths = tuple(len(s) for s in own) or (1,)
        self.tokens = flat.unsqueeze(0)
        self.positions = torch.cat([torch.arange(n) for n in self.lengths]).unsqueeze(0)
        self.targets, self.rows, self.owner = flat[place], (place - 1).clamp(min=0), owner
        rollout = torch.cat([s.rollout for s in own]) if own else torch.zeros(1)
        self.rollout = rollout[place]
        self.advantages = torch.tensor([s.advantage for s in own] or [0.0])
        self.rewards = torch.tensor([s.reward for s in own] or [0.0])
        counts = torch.tensor(self.lengths)
        self.member = torch.arange(len(counts)).repeat_interleave(counts)
        self.inner = torch.ones(len(flat), dtype=torch.bool)
        self.inner[counts.cumsum(0) - 1] = False
        self.valid = torch.cat([s.valid for s in own]) if own else torch.zeros(1, dtype=torch.bool)
        self.placeholders = (~self.valid).nonzero().squeeze(-1)

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with its tensors on ``device``."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(moved, name, on_device(value, device))
        return moved

    def recorded(self) -> Tensor:
        """Recorded experts ``[T, L, K]`` in the batch's narrow dtype, on the micro-batch's device.

        They take more memory than all else together, so each call copies them.
        """
        return joined([s.routes for s in self.sequences], self.tokens.device)

    def _scored(self, sequence: OwnSequence) -> Tensor:
        return torch.arange(1, len(sequence)) if self.every_token else sequence.scored
