"""Compares learning with the optimizer's moments in f32 and in bf16, on the CPU.

    python -m orchestrate_trainer.bench_moments --seeds 8

A small Qwen3-MoE with random weights learns a rule by reinforcement: each token's id must be that
of the token before it plus 1, modulo 4. Every step samples groups from the policy, and the trainer
applies its update with replay. For every seed the same start is trained three times, in an order
that alternates: with moments in f32, in bf16, and in f32 with other samples, which shows how far
two runs differ by chance.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from . import bench
from .batch import Sequence
from .bench_batch import SampledBatch, random_model
from .learner import Learner
from .policy import ModelOptions, Policy, load_policy
from .settings import Hyperparameters
from .world import World

__all__ = ["ARMS", "learn", "main", "parser", "summary"]

#: Arms with the dtype of their moments, and what is added to the seed of their samples.
ARMS = {"f32": ("f32", 0), "bf16": ("bf16", 0), "f32_other_samples": ("f32", 1000)}
#: The rule: the remainder of a token's id grows by 1 from one token to the next.
CLASSES = 4
#: Steps at the end of a run whose mean reward counts as its result.
LAST = 20
SHAPE = {
    "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_width": 8, "experts": 8,
    "top_k": 2, "expert_width": 32, "vocab": 61,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        prog="orchestrate_trainer.bench_moments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("--seeds", type=int, default=8, help="number of starts (default: %(default)s)")
    add("--steps", type=int, default=80, help="steps of each run (default: %(default)s)")
    add("--prompts", type=int, default=4, help="groups of a step (default: %(default)s)")
    add("--group", type=int, default=16, help="samples of a group (default: %(default)s)")
    add("--tokens", type=int, default=12, help="tokens of a sequence (default: %(default)s)")
    add("--sampled", type=int, default=8, help="of these, sampled (default: %(default)s)")
    add("--learning-rate", type=float, default=1e-2)
    add("--json", type=Path, help="file to write the rewards of every step to")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Prints a table in Markdown. Returns the exit status."""
    given = parser().parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    world = World.join("cpu")
    rewards: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    try:
        for seed in range(given.seeds):
            names = list(ARMS)
            for arm in names[::-1] if seed % 2 else names:
                rewards[arm].append(learn(given, arm, seed, world))
                last = statistics.fmean(rewards[arm][-1][-LAST:])
                print(f"seed {seed}, {arm}: reward {last:.3f}", file=sys.stderr, flush=True)
    finally:
        world.leave()
    print(table(summary(rewards)))
    if given.json:
        given.json.write_text(json.dumps({"rewards": rewards, "settings": str(vars(given))}) + "\n")
    return 0


def learn(given: argparse.Namespace, arm: str, seed: int, world: World) -> list[float]:
    """Mean reward of each step of a run."""
    moments, offset = ARMS[arm]
    torch.manual_seed(seed)
    shape = argparse.Namespace(**SHAPE, tokens=given.tokens)
    with tempfile.TemporaryDirectory(prefix="orchestrate-bench-") as folder:
        random_model(shape, world.device).save_pretrained(folder)
        options = ModelOptions(compute="f32", moments="bf16" if moments == "bf16" else "f32")
        policy = load_policy(Path(folder), options, world)
    learner = Learner.of(policy, world, moments)
    draw = torch.Generator().manual_seed(seed + offset)
    settings = _settings(given)
    found = []
    for _ in range(given.steps):
        batch = sample_groups(policy, given, draw)
        found.append(statistics.fmean(sequence.reward for sequence in batch.sequences))
        bench._step(learner, batch, settings, world)
    return found


@torch.no_grad()
def sample_groups(policy: Policy, given: argparse.Namespace, draw: torch.Generator) -> SampledBatch:
    """Groups of samples of random prompts, with rewards and normalised advantages."""
    count, prompt = given.prompts * given.group, given.tokens - given.sampled
    prompts = torch.randint(SHAPE["vocab"], (given.prompts, prompt), generator=draw)
    tokens = prompts.repeat_interleave(given.group, dim=0)
    logprobs = torch.zeros(count, prompt)
    for _ in range(given.sampled):
        scores, _ = _next_logprobs(policy, tokens)
        chosen = torch.multinomial(scores.exp(), 1, generator=draw)
        tokens = torch.cat([tokens, chosen], dim=1)
        logprobs = torch.cat([logprobs, scores.gather(1, chosen)], dim=1)
    _, routes = _next_logprobs(policy, tokens)
    followed = (tokens[:, prompt:] - tokens[:, prompt - 1 : -1]) % CLASSES == 1
    rewards = followed.float().mean(1)
    grouped = rewards.view(given.prompts, given.group)
    spread = grouped.std(1, keepdim=True, unbiased=False)
    advantages = ((grouped - grouped.mean(1, keepdim=True)) / (spread + 1e-6)).flatten()
    mask = np.zeros(given.tokens, "u1")
    mask[prompt:] = 1
    valid = np.ones(given.tokens, "u1")
    valid[-1] = 0
    layers = tuple(range(SHAPE["layers"]))
    return SampledBatch(
        [
            Sequence(
                index=number,
                episode_id=f"moments.{number:02}",
                group=number // given.group,
                advantage=float(advantages[number]),
                reward=float(rewards[number]),
                token_ids=tokens[number].numpy().astype("u4"),
                loss_mask=mask,
                rollout_logprobs=logprobs[number].numpy(),
                policy_versions=np.zeros(given.tokens, "i8"),
                routing_valid=valid,
                layers=layers,
                _rows=routes[number].numpy(),
                _row_index=None,
                _columns=slice(None),
                _positions=layers,
            )
            for number in range(count)
        ]
    )


def summary(rewards: dict[str, list[list[float]]]) -> dict[str, dict[str, list[float]]]:
    """Mean reward of each arm by seed, over the whole run and over its last steps."""
    spans = {"all steps": slice(None), f"last {LAST} steps": slice(-LAST, None)}
    return {
        name: {arm: [statistics.fmean(run[span]) for run in runs] for arm, runs in rewards.items()}
        for name, span in spans.items()
    }


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """A table in Markdown."""
    lines = [
        "| mean reward over | moments | mean | lowest | highest | difference from f32, same seed |",
        "|---|---|---|---|---|---|",
    ]
    for name, arms in found.items():
        for arm, values in arms.items():
            apart = [one - two for one, two in zip(values, arms["f32"], strict=True)]
            lines.append(
                f"| {name} | {arm.replace('_', ' ')} | {statistics.fmean(values):.3f} | "
                f"{min(values):.3f} | {max(values):.3f} | "
                f"{'' if arm == 'f32' else _with_error(apart)} |"
            )
    return "\n".join(lines)


def _with_error(values: list[float]) -> str:
    """Mean with its standard error, and the range."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return (
        f"{statistics.fmean(values):+.3f} ± {error:.3f} ({min(values):+.3f} to {max(values):+.3f})"
    )


def _next_logprobs(policy: Policy, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the token after each of ``tokens`` ``[S, T]``, ``[S, V]``, and the executed
    experts, ``[S, T, L, K]``."""
    count, length = tokens.shape
    vocab = SHAPE["vocab"]
    positions = torch.arange(length).repeat(count)
    last = torch.arange(1, count + 1) * length - 1
    with policy.routing.micro_batch():
        logprobs, _, _ = policy(
            tokens.reshape(1, -1),
            positions[None],
            (length,) * count,
            last.repeat_interleave(vocab),
            torch.arange(vocab).repeat(count),
            1.0,
        )
        routes = policy.routing.executed()
    return logprobs.view(count, vocab), routes.view(count, length, *routes.shape[1:])


def _settings(given: argparse.Namespace) -> Hyperparameters:
    """A step of one update with the orchestrator's defaults, but another learning rate."""
    budget = argparse.Namespace(micro_batch_tokens=given.prompts * given.group * given.tokens)
    return dataclasses.replace(
        bench._settings(budget),
        mini_steps=1,
        learning_rate=given.learning_rate,
        betas=(0.9, 0.999),
        weight_decay=0.01,
    )


if __name__ == "__main__":
    sys.exit(main())
