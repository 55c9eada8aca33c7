"""Whole steps on a tiny model: what changes the result, and what must not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import numpy as np
import pytest

import torch  # isort: skip
from model_families import hyperparameters, write_batch

from orchestrate_trainer.batch import Batch
from orchestrate_trainer.data import distribute
from orchestrate_trainer.learner import Learner
from orchestrate_trainer.passes import StepError, measure_logprobs
from orchestrate_trainer.policy import ModelOptions, load_policy
from orchestrate_trainer.settings import Hyperparameters, Unusable
from orchestrate_trainer.step import apply

LENGTHS = (12, 7, 19, 10, 5)


@dataclasses.dataclass
class Bench:
    """A model and a batch to apply steps to."""

    folder: Path
    batch: Batch
    world: Any
    kernel: str = "eager"

    def open(self) -> Learner:
        """A learner with the starting weights."""
        policy = load_policy(self.folder, ModelOptions(experts=self.kernel), self.world)
        return Learner.of(policy, self.world)

    def step(
        self, progress: Callable[[str, float], bool] = lambda *_: True, **changed: Any
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Metrics of one step from the starting weights, and the weights after it."""
        learner = self.open()
        metrics = self.apply(learner, progress, **changed)
        return metrics, [p.full_tensor().detach() for p in learner.policy.parameters()]

    def apply(
        self,
        learner: Learner,
        progress: Callable[[str, float], bool] = lambda *_: True,
        **changed: Any,
    ) -> dict[str, Any]:
        """Applies one step to a learner; returns its metrics."""
        settings = Hyperparameters.parse(hyperparameters(**changed))
        return apply(
            learner, lambda: self.open().policy, self.batch, settings, self.world, progress
        )


@pytest.fixture
def bench(folders: dict[str, Path], world: Any, tmp_path: Path) -> Bench:
    """A tiny Qwen3-MoE with the eager expert kernel; :mod:`test_kernels` has the others."""
    shape = load_policy(folders["qwen3_moe"], ModelOptions(), world).shape
    manifest = write_batch(tmp_path / "batch", shape, LENGTHS)
    return Bench(folders["qwen3_moe"], Batch.open(manifest), world)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(one, other, strict=True))


def test_size_of_micro_batches_changes_nothing(bench: Bench) -> None:
    # Adam divides by the size of the gradient: with this term, rounding errors of small ones stay
    # small.
    changed: dict[str, Any] = {"adam_eps": 1e-3}
    whole, weights = bench.step(micro_batch_tokens=10_000, **changed)
    for tokens in (1, 20):
        parts, others = bench.step(micro_batch_tokens=tokens, **changed)
        assert same(weights, others)
        for name in ("loss", "grad_norm", "entropy", "clip_fraction"):
            assert parts[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-7), name


def test_first_mini_step_is_on_policy(bench: Bench) -> None:
    """With a learning rate of 0 every mini step has the rollout weights. Recompute and update are
    the same computation, so each ratio is exactly 1."""
    for replay in ("none", "recompute", "rollout"):
        metrics, _ = bench.step(mini_steps=3, learning_rate=0.0, routing_replay=replay)
        assert metrics["ratio"]["mean"] == metrics["ratio"]["max"] == 1.0
        assert metrics["clip_fraction"] == 0.0
    moved, _ = bench.step(mini_steps=3)
    assert moved["ratio"]["max"] != 1.0


def test_replay_changes_the_measurements(bench: Bench) -> None:
    metrics, _ = bench.step()
    sequences = [bench.batch.sequence(n) for n in range(len(LENGTHS))]
    missing = sum(int((s.routing_valid[:-1] == 0).sum()) for s in sequences)
    assert metrics["routing_missing"] == missing * 2 > 0
    assert metrics["mismatch"] != metrics["mismatch_no_replay"]
    assert metrics["tokens"] == sum(LENGTHS)
    loss_tokens = sum(int(s.loss_mask[1:].sum()) for s in sequences)
    assert metrics["loss_tokens"] == loss_tokens
    # Two random choices of 2 from 8 experts differ with probability 1 - 1/28.
    assert 0.7 < metrics["disagreement"]["router"] <= 1
    assert sum(metrics["disagreement"]["histogram"]) == pytest.approx(1)
    assert all(0 < load <= 1 for load in metrics["expert_load_entropy"])
    assert [len(curve) for curve in metrics["expert_load"]] == [8, 8]
    for name in ("mismatch", "mismatch_no_replay"):
        counts = metrics[name]
        assert sum(counts["token_histogram"]) == loss_tokens
        assert sum(cell[2] for cell in counts["probability_grid"]) == loss_tokens
        assert sum(counts["sequence_histogram"]) == len(LENGTHS)
    assert sum(metrics["disagreement"]["token_histogram"]) == pytest.approx(1)
    assert sum(metrics["disagreement"]["sequence_histogram"]) == len(LENGTHS)
    own, _ = bench.step(routing_replay="recompute")
    assert own["mismatch"] == own["mismatch_no_replay"]
    assert own["disagreement"]["router"] == pytest.approx(metrics["disagreement"]["router"])
    assert own["routing_missing"] == 0


def test_measured_log_probs_agree_with_the_step(bench: Bench) -> None:
    policy = bench.open().policy
    metrics, _ = bench.step()
    for replay, name in ((True, "mismatch"), (False, "mismatch_no_replay")):
        found = measure_logprobs(policy, bench.batch, replay, 1.0, 30, bench.world)
        assert [len(row) for row in found["logprobs"]] == list(LENGTHS)
        assert all(row[0] == 0.0 for row in found["logprobs"])
        assert found["mismatch"]["kl_k3"] == pytest.approx(metrics[name]["kl_k3"], rel=1e-4)
        assert (found["disagreement"] is None) == replay


ALGORITHMS: list[dict[str, Any]] = [
    {"policy_loss": "grpo", "dual_clip": 3.0, "aggregation": "seq-mean-token-mean"},
    {"policy_loss": "grpo", "aggregation": "token-sum-norm", "loss_norm_tokens": 20.0},
    {"policy_loss": "grpo", "router_shift": "before_clip", "router_shift_floor": 0.9},
    {"policy_loss": "grpo", "importance_correction": "tis"},
    {"policy_loss": "grpo", "importance_correction": "icepop", "importance_high": 5.0},
    {"policy_loss": "grpo", "importance_correction": "mis", "importance_level": "sequence"},
    {"policy_loss": "grpo", "kl_coefficient": 0.5},
    {"policy_loss": "grpo", "kl_coefficient": 0.5, "kl_unbiased": True},
    {"policy_loss": "gspo", "aggregation": "seq-mean-token-mean", "clip_low": 3e-4,
     "clip_high": 4e-4, "importance_correction": "geometric_mask",
     "importance_level": "sequence", "importance_low": 0.0, "importance_high": 10.0},
    {"policy_loss": "gmpo", "aggregation": "seq-mean-token-mean", "clip_low": 0.4,
     "clip_high": 0.4},
    {"policy_loss": "rspo", "aggregation": "seq-mean-token-mean", "clip_low": 0.4,
     "clip_high": 0.4, "router_shift": "before_clip"},
    {"policy_loss": "rspo", "aggregation": "seq-mean-token-mean", "clip_low": 0.4,
     "clip_high": 0.4, "router_shift": "after_clip"},
    {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    {"policy_loss": "minirl", "aggregation": "seq-mean-token-sum", "importance_high": 5.0},
    {"policy_loss": "sapo"},
    {"policy_loss": "ppo", "dual_clip": 3.0},
    {"policy_loss": "ppo", "gae_gamma": 0.9, "gae_lambda": 0.8},
    {"policy_loss": "ppo", "kl_coefficient": 0.5, "kl_estimator": "k1"},
    {"policy_loss": "ppo", "value_coefficient": 10.0, "value_clip": 0.01},
    {"policy_loss": "ppo", "router_shift": "before_clip"},
]  # fmt: skip


def test_every_algorithm_changes_the_weights_in_its_own_way(bench: Bench) -> None:
    """No two settings give the same weights."""
    base, reached = bench.step(mini_steps=2)
    results = [reached]
    for settings in ALGORITHMS:
        metrics, weights = bench.step(mini_steps=2, **settings)
        assert np.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0, settings
        assert 0 < metrics["router_grad_norm"] < metrics["grad_norm"]
        assert not any(all(map(torch.equal, weights, other)) for other in results), settings
        results.append(weights)
        shifted = settings.get("router_shift", "none") != "none"
        assert (metrics["router_shift"] is not None) == shifted
        assert (metrics["kl_reference"] is not None) == ("kl_coefficient" in settings)
        assert (metrics["value"] is not None) == (settings["policy_loss"] == "ppo")
        assert metrics["predictor_loss"] is None
    assert base["kl_reference"] is None


def test_value_head_learns_the_returns(bench: Bench) -> None:
    """The coefficient is so small that only the policy loss trains the model."""
    changed: dict[str, Any] = {
        "policy_loss": "ppo",
        "mini_steps": 2,
        "learning_rate": 1e-3,
        "value_rate": 30.0,
        "value_coefficient": 1e-6,
    }
    learner = bench.open()
    first = bench.apply(learner, **changed)["value"]
    for _ in range(40):
        last = bench.apply(learner, **changed)["value"]
    assert last["loss"] < 0.5 * first["loss"]
    assert last["explained_variance"] > max(first["explained_variance"], 0.1)


def test_single_mini_step_of_ppo_is_on_policy(bench: Bench) -> None:
    """Old and new values are equal, so the clip of the value loss has no effect."""
    one, weights = bench.step(policy_loss="ppo", value_clip=1e-6)
    two, others = bench.step(policy_loss="ppo", value_clip=1e6)
    assert one["ratio"]["max"] == 1.0 and one["value"] == two["value"]
    assert all(map(torch.equal, weights, others))


def test_router_predictor_learns_without_changing_the_model(bench: Bench) -> None:
    changed: dict[str, Any] = {"mini_steps": 4, "predictor_rate": 1.0, "predictor_tokens": 8}
    learner = bench.open()
    metrics = bench.apply(learner, routing_replay="predictive", **changed)
    predictor = learner.heads.predictor().weights
    assert predictor.shape == (2, 8, 16) and predictor.abs().max() > 0
    assert metrics["predictor_loss"] > 0
    # The model's step is the same as with R3.
    plain, weights = bench.step(routing_replay="rollout", **changed)
    after = [p.full_tensor().detach() for p in learner.policy.parameters()]
    assert all(map(torch.equal, weights, after)) and plain["predictor_loss"] is None


def test_router_predictor_beats_predicting_no_change(bench: Bench) -> None:
    """The same batch is applied to the same weights again and again, so the change is learnable."""
    learner = bench.open()
    changed: dict[str, Any] = {
        "routing_replay": "predictive",
        "mini_steps": 3,
        "learning_rate": 1e-4,
        "predictor_rate": 10.0,
    }
    losses = [bench.apply(learner, **changed)["predictor_loss"]]
    start = [p.full_tensor().detach().clone() for p in bench.open().policy.parameters()]
    for _ in range(30):
        fresh = dataclasses.replace(bench.open(), heads=learner.heads)
        assert all(map(torch.equal, start, (p.full_tensor() for p in fresh.policy.parameters())))
        losses.append(bench.apply(fresh, **changed)["predictor_loss"])
    assert losses[-1] < 0.9 * losses[0]


def test_off_policy_sequences_are_masked(bench: Bench, tmp_path: Path) -> None:
    """One sequence per mini step, and a learning rate that moves log-probs far. Only sequences
    with a negative advantage are masked."""
    negative = np.full(len(LENGTHS), -1, "<f4")
    shape = bench.open().policy.shape
    manifest = write_batch(tmp_path / "negative", shape, LENGTHS, advantages=negative)
    bench = dataclasses.replace(bench, batch=Batch.open(manifest))
    large: dict[str, Any] = {"mini_steps": len(LENGTHS), "learning_rate": 0.1}
    _, plain = bench.step(**large)
    _, masked = bench.step(**large, off_policy_delta=1e-6)
    _, lenient = bench.step(**large, off_policy_delta=1e6)
    assert not all(map(torch.equal, plain, masked))
    assert all(map(torch.equal, plain, lenient))


def test_reference_policy_has_the_starting_weights(bench: Bench) -> None:
    """Without replay and before any update the divergence from the start is zero. It is measured
    at the rollout weights, however many mini steps follow."""
    for mini_steps in (1, 3):
        learner = bench.open()
        changed: dict[str, Any] = {
            "kl_coefficient": 1.0,
            "routing_replay": "none",
            "mini_steps": mini_steps,
        }
        first = bench.apply(learner, **changed)
        assert first["kl_reference"] == pytest.approx(0.0, abs=1e-9)
        assert bench.apply(learner, **changed)["kl_reference"] > 1e-6


def test_warm_up_counts_optimizer_steps(bench: Bench) -> None:
    metrics, _ = bench.step(mini_steps=3, warmup_steps=6, learning_rate=0.6)
    assert metrics["learning_rate"] == pytest.approx(0.3)


@pytest.mark.parametrize(("stop", "moved"), [(("recompute", 0.0), False), (("update", 0.5), True)])
def test_step_stops_between_phases_on_request(
    bench: Bench, stop: tuple[str, float], moved: bool
) -> None:
    with pytest.raises(StepError, match="shutting down") as caught:
        bench.step(lambda phase, fraction: (phase, fraction) != stop, mini_steps=2)
    assert caught.value.moved == moved


def test_loss_that_is_not_finite_stops_before_the_weights_move(bench: Bench) -> None:
    learner = bench.open()
    with torch.no_grad():
        next(iter(learner.policy.parameters())).to_local().fill_(float("nan"))
    with pytest.raises(StepError, match="the loss of mini step 1 is not finite") as caught:
        bench.apply(learner)
    assert not caught.value.moved


@pytest.mark.parametrize(
    ("array", "value", "problem"),
    [
        ("token_ids", 61, "outside the vocabulary of 61"),
        ("rollout_logprobs", np.nan, "rollout log-prob is not finite"),
        ("routed_experts", 8, "ids must be distinct and below 8"),
        ("routed_experts", "repeated", "ids must be distinct and below 8"),
    ],
)
def test_batch_with_invalid_values_is_refused(
    bench: Bench, tmp_path: Path, array: str, value: Any, problem: str
) -> None:
    shape = bench.batch.manifest["model"]
    manifest = write_batch(tmp_path / "good", shape, LENGTHS)
    sequences = [Batch.open(manifest).sequence(n) for n in range(len(LENGTHS))]
    values = np.concatenate([getattr(s, array) for s in sequences])
    valid = np.concatenate([s.routing_valid for s in sequences])
    mask = np.concatenate([s.loss_mask for s in sequences])
    token = int(np.flatnonzero((valid == 1) & (mask == 1))[3])
    if value == "repeated":
        values[token, 1] = values[token, 1, 0]
    elif array == "routed_experts":
        values[token, 1, 0] = value
    else:
        values[token] = value
    bad = write_batch(tmp_path / "bad", shape, LENGTHS, **{array: values})
    with pytest.raises(StepError, match=problem):
        dataclasses.replace(bench, batch=Batch.open(bad)).step()


def test_batch_without_loss_tokens_is_refused(bench: Bench, tmp_path: Path) -> None:
    mask = np.zeros(sum(LENGTHS), "u1")
    # The first token has no token before it to be predicted from.
    mask[0] = 1
    shape = bench.batch.manifest["model"]
    empty = Batch.open(write_batch(tmp_path / "empty", shape, LENGTHS, loss_mask=mask))
    with pytest.raises(StepError, match="no loss tokens"):
        dataclasses.replace(bench, batch=empty).step()


def test_sequences_are_distributed_longest_first_to_the_emptiest_part() -> None:
    assert distribute([5, 9, 2, 9, 4], 2) == [[0, 1], [2, 3, 4]]
    assert distribute([3, 3], 2) == [[0], [1]]
    assert distribute([1], 1) == [[0]]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"policy_loss": "reinforce"}, "policy_loss"),
        ({"routing_replay": "record"}, "routing_replay"),
        ({"routing_replay": "predictive", "mini_steps": 1}, "mini_steps"),
        ({"policy_loss": "ppo", "gae_lambda": 1.5}, "gae_lambda"),
        ({"policy_loss": "ppo", "value_rate": 0.0}, "value_rate"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": "1e-6"}, "learning_rate"),
        ({"mini_steps": 0}, "mini_steps"),
        ({"mini_steps": True}, "mini_steps"),
        ({"betas": [0.9, 1.0]}, "betas"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"policy_loss": "sapo", "dual_clip": 3.0}, "dual_clip"),
        ({"policy_loss": "gspo"}, "aggregation"),
        ({"policy_loss": "cispo", "clip_low": 1.0, "router_shift": "before_clip"}, "router_shift"),
        ({"router_shift": "before_clip", "router_shift_floor": 0.5}, "router_shift_floor"),
        ({"importance_correction": "icepop", "importance_level": "sequence"}, "importance_level"),
        ({"importance_correction": "geometric_mask"}, "importance_level"),
        ({"importance_correction": "icepop", "importance_low": 3.0}, "importance_low"),
        ({"policy_loss": "minirl", "importance_correction": "tis"}, "importance_correction"),
        ({"kl_coefficient": 1.0, "kl_estimator": "k1"}, "kl_estimator"),
        ({"kl_coefficient": 1.0, "kl_estimator": "k2", "kl_unbiased": True}, "kl_unbiased"),
    ],
)
def test_invalid_settings_are_refused_and_named(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(Unusable, match=field):
        Hyperparameters.parse(hyperparameters(**changed))


def test_missing_settings_are_refused_and_named() -> None:
    for field in ("policy_loss", "learning_rate", "measure_no_replay"):
        given = hyperparameters()
        del given[field]
        with pytest.raises(Unusable, match=field):
            Hyperparameters.parse(given)
    given = hyperparameters()
    del given["dual_clip"]
    assert Hyperparameters.parse(given).dual_clip is None
