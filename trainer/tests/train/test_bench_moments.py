"""The comparison of moments runs, on too few steps to learn anything."""

from __future__ import annotations

from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip

from orchestrate_trainer import bench_moments
from orchestrate_trainer.bench_moments import ARMS, learn, parser, summary, table


def test_every_arm_starts_alike_and_other_samples_differ(world: Any) -> None:
    given = parser().parse_args(["--steps", "3", "--prompts", "2", "--group", "4"])
    rewards = {arm: [learn(given, arm, seed, world) for seed in range(2)] for arm in ARMS}
    assert all(0 <= reward <= 1 for runs in rewards.values() for run in runs for reward in run)
    # The first samples are drawn before any update.
    assert rewards["f32"][0][0] == rewards["bf16"][0][0]
    assert rewards["f32"] != rewards["f32_other_samples"]
    lines = table(summary(rewards)).splitlines()
    assert len(lines) == 2 + 2 * len(ARMS) and len({line.count("|") for line in lines}) == 1


def test_the_summary_compares_runs_of_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_moments, "LAST", 1)
    runs = {"f32": [[0.0, 0.5], [0.0, 0.7]], "bf16": [[0.2, 0.6], [0.0, 0.6]]}
    found = summary(runs)
    assert found["last 1 steps"] == {"f32": [0.5, 0.7], "bf16": [0.6, 0.6]}
    last = table(found).splitlines()[-1]
    assert last.endswith("| bf16 | 0.600 | 0.600 | 0.600 | +0.000 ± 0.100 (-0.100 to +0.100) |")


def test_samples_have_the_rewards_of_the_rule(world: Any) -> None:
    given = parser().parse_args(["--steps", "1", "--prompts", "2", "--group", "4"])
    batches = []

    def keep(_learner: Any, batch: Any, *_: Any) -> None:
        batches.append(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_moments.bench, "_step", keep)
        learn(given, "f32", 0, world)
    for sequence in batches[0].sequences:
        ids = torch.from_numpy(sequence.token_ids.astype("i8"))
        followed = [bool(step % 4 == 1) for step in ids.diff()[3:]]
        assert sequence.reward == pytest.approx(sum(followed) / 8)
        assert sequence.loss_mask.sum() == 8 and (sequence.rollout_logprobs[4:] < 0).all()
    groups = [batches[0].sequences[:4], batches[0].sequences[4:]]
    for group in groups:
        assert sum(sequence.advantage for sequence in group) == pytest.approx(0, abs=1e-4)
