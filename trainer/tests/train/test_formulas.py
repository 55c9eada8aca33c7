"""Every formula against its worked numbers, in float64."""

from __future__ import annotations

from typing import Any

from needs import golden_cases

import torch  # isort: skip
from torch import Tensor

from orchestrate_trainer import advantages, losses, measures
from orchestrate_trainer.corrections import Tokens, correction, off_policy_keep
from orchestrate_trainer.losses import Totals
from orchestrate_trainer.prediction import predicted_route, predictor_loss
from orchestrate_trainer.values import Returns, whiten
from orchestrate_trainer.routers import RouterSpec, log_router_probs


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: Any, expected: Any) -> None:
    found = found if isinstance(found, Tensor) else tensor(found)
    torch.testing.assert_close(found.double(), tensor(expected), rtol=1e-9, atol=1e-9)


class Rows:
    """A golden batch ``[S, T]`` as one row of loss tokens."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.mask = tensor(inputs["mask"]) > 0
        self.logp = tensor(inputs["logp"])[self.mask].requires_grad_()
        self.old = tensor(inputs["logp_old"])[self.mask]
        self.advantage = tensor(inputs["advantage_per_sequence"])
        owner = torch.arange(len(self.mask)).unsqueeze(1).expand_as(self.mask)
        self.tokens = Tokens(owner[self.mask], len(self.mask))
        self.each = self.advantage[self.tokens.sequence]
        count = int(self.mask.sum())
        self.totals = Totals(len(self.mask), count, inputs.get("norm_constant", 1.0))

    def row(self, values: Any) -> Tensor:
        return tensor(values)[self.mask]

    def check(self, loss: Tensor, expected: dict[str, Any]) -> None:
        close(loss, expected["loss"])
        loss.backward()
        close(self.logp.grad, tensor(expected["dloss_dlogp"])[self.mask].tolist())


def test_grpo() -> None:
    for case in golden_cases("grpo_loss"):
        inputs, expected = case["inputs"], case["expected"]
        rows = Rows(inputs)
        limits = (inputs["eps_low"], inputs["eps_high"], inputs["dual_clip_c"])
        loss = losses.surrogate(rows.logp - rows.old, rows.each, *limits)
        close(loss.terms.detach(), rows.row(expected["token_loss"]).tolist())
        clipped = loss.clipped_high | loss.clipped_low
        close(clipped.double().mean(), expected["clip_fraction"])
        rows.check(
            losses.aggregate(loss.terms, rows.tokens, rows.totals, inputs["agg"]), expected
        )


def test_gspo() -> None:
    for case in golden_cases("gspo_loss"):
        inputs, expected = case["inputs"], case["expected"]
        rows = Rows(inputs)
        loss = losses.sequence_surrogate(
            rows.logp - rows.old, rows.tokens, rows.advantage, inputs["eps_low"], inputs["eps_high"]
        )
        clipped = tensor(expected["clipped_sequences"]).bool()[rows.tokens.sequence]
        assert torch.equal(loss.clipped_high | loss.clipped_low, clipped)
        rows.check(loss.terms.sum() / rows.totals.sequences, expected)


CORRECTIONS = {
    "tis_C2": ("tis", "token", 0.0, 2.0),
    "tis_seq_C1.5": ("tis", "sequence", 0.0, 1.5),
    "mis_token_C2": ("mis", "token", 0.0, 2.0),
    "mis_seq_C1.5": ("mis", "sequence", 0.0, 1.5),
    "icepop_0.5_5": ("icepop", "token", 0.5, 5.0),
    "geo_seq_mask_0.95_1.05": ("geometric_mask", "sequence", 0.95, 1.05),
}


def test_importance_corrections() -> None:
    cases = golden_cases("tis_mis_icepop")
    assert {case["name"] for case in cases} == set(CORRECTIONS)
    for case in cases:
        inputs, expected = case["inputs"], case["expected"]
        rows = Rows(inputs)
        weight, changed = correction(
            rows.old, rows.row(inputs["logp_rollout"]), rows.tokens, *CORRECTIONS[case["name"]]
        )
        close(weight, rows.row(expected["weight"]).tolist())
        if expected["truncated_or_masked"] is not None:
            assert changed.tolist() == tensor(expected["truncated_or_masked"]).bool()[
                rows.mask
            ].tolist()
        loss = losses.surrogate(
            rows.logp - rows.old, rows.each, inputs["eps_low"], inputs["eps_high"]
        )
        total = losses.aggregate(loss.terms * weight, rows.tokens, rows.totals, inputs["agg"])
        rows.check(total, expected)


def test_other_policy_losses() -> None:
    for case in golden_cases("other_policy_losses"):
        inputs, expected, name = case["inputs"], case["expected"], case["name"]
        rows = Rows(inputs)
        mode = inputs.get("agg", "seq-mean-token-mean")
        if name == "cispo_upper_only":
            loss = losses.cispo(rows.logp, rows.old, rows.each, 1.0, inputs["eps_high_is"])
        elif name == "minirl":
            mode = "seq-mean-token-sum"
            rollout = rows.row(inputs["logp_rollout"])
            limits = (inputs["eps_low"], inputs["eps_high"], inputs["is_cap"])
            loss = losses.minirl(rows.logp, rows.old, rollout, rows.each, *limits)
        elif name == "sapo":
            taus = (inputs["tau_pos"], inputs["tau_neg"])
            loss = losses.sapo(rows.logp - rows.old, rows.each, *taus)
        else:
            clip = inputs["log_clip"]
            loss = losses.geometric_mean(
                rows.logp - rows.old, rows.tokens, rows.advantage, clip, clip
            )
            rows.check(loss.terms.sum() / rows.totals.sequences, expected)
            continue
        rows.check(losses.aggregate(loss.terms, rows.tokens, rows.totals, mode), expected)


def test_router_shift() -> None:
    for case in golden_cases("rspo"):
        inputs, expected = case["inputs"], case["expected"]
        rows = Rows(inputs)
        old, new = tensor(inputs["router_logits_old"]), tensor(inputs["router_logits_new"])
        spec = RouterSpec("softmax_of_chosen", old.shape[-1], inputs["top_k"])
        chosen = spec.select(old.flatten(0, 2)).view(*old.shape[:3], -1)
        shift, raw = losses.router_shift(
            log_router_probs(spec, new, chosen)[rows.mask],
            log_router_probs(spec, old, chosen)[rows.mask],
            inputs["gamma_min"],
        )
        close(shift.exp(), rows.row(expected["gamma"]).tolist())
        if case["name"] == "gamma":
            close(raw, rows.row(expected["gamma_raw"]).tolist())
            floored = (raw < inputs["gamma_min"]).double().mean()
            close(floored, expected["floor_fraction"])
            continue
        ratio = rows.logp - rows.old
        limits = (inputs.get("eps_low", 0.4), inputs.get("eps_high", 0.4))
        if case["name"] == "grpo_rs_preclip":
            terms = losses.surrogate(ratio + shift, rows.each, *limits).terms
            rows.check(losses.aggregate(terms, rows.tokens, rows.totals, inputs["agg"]), expected)
            continue
        if case["name"] == "gspo_rs_preclip_wide":
            loss = losses.sequence_surrogate(ratio + shift, rows.tokens, rows.advantage, *limits)
        elif case["name"] == "rspo_v1_postclip":
            loss = losses.geometric_mean(ratio, rows.tokens, rows.advantage, *limits, shift)
        else:
            loss = losses.geometric_mean(ratio + shift, rows.tokens, rows.advantage, *limits)
        rows.check(loss.terms.sum() / rows.totals.sequences, expected)


def test_divergence_and_extreme_tokens() -> None:
    for case in golden_cases("kl_and_extreme_tokens"):
        inputs, expected = case["inputs"], case["expected"]
        if case["name"] == "token_estimators":
            sampler, trainer = tensor(inputs["logp_infer"]), tensor(inputs["logp_train"])
            mask = tensor(inputs["mask"]) > 0
            close(measures.k3(trainer, sampler), expected["k3_tokens"])
            shares = [
                measures.extreme(trainer, sampler, tau)[mask].double().mean().item()
                for tau in inputs["taus"]
            ]
            close(shares, expected["F_tau"])
        elif case["name"] == "expectation_identity":
            q, p = tensor(inputs["q_infer"]), tensor(inputs["p_train"])
            close((q * measures.k3(p.log(), q.log())).sum(), expected["KL_q_p"])
        else:
            for name in ("k1", "k2", "k3"):
                logp = tensor(inputs["logp"]).requires_grad_()
                value = losses.kl_penalty(logp, tensor(inputs["logp_ref"]), name)
                close(value.detach(), expected[f"{name}_value"])
                value.sum().backward()
                close(logp.grad, expected[f"{name}_grad"])
            logp = tensor(inputs["logp"]).requires_grad_()
            value = losses.kl_penalty(logp, tensor(inputs["logp_ref"]), "k3_plus")
            close(value.detach(), expected["k3_value"])
            value.sum().backward()
            close(logp.grad, expected["k2_grad"])


def test_unbiased_divergence_has_both_gradients() -> None:
    logp = tensor([-0.9, -2.0]).requires_grad_()
    old, reference = tensor([-1.0, -1.8]), tensor([-1.2, -1.5])
    losses.kl_penalty(logp, reference, "k3", logp - old).sum().backward()
    ratio, k = (logp - old).exp(), logp - reference
    # d(r·k3) = r·k3 + r·(1 − e^−k) = r·k.
    close(logp.grad, (ratio * k).detach().tolist())


def test_mismatch_of_the_protocol(world: Any) -> None:
    inputs = golden_cases("kl_and_extreme_tokens")[0]["inputs"]
    expected = golden_cases("kl_and_extreme_tokens")[0]["expected"]
    mask = tensor(inputs["mask"]) > 0
    sums = measures.Mismatch()
    # In two parts: a micro-batch more or less changes nothing.
    trainer, sampler = tensor(inputs["logp_train"])[mask], tensor(inputs["logp_infer"])[mask]
    one = Tokens(torch.zeros(3, dtype=torch.long), 1)
    rest = torch.zeros(len(trainer) - 3, dtype=torch.long)
    sums.add(trainer[:3], sampler[:3], one)
    sums.add(trainer[3:], sampler[3:], Tokens(rest, 1))
    found, ratio = sums.finish(world)
    close(found["kl_k3"], expected["kl_k3"])
    close(found["mean_abs_logprob_diff"], expected["mean_abs_logp_diff"])
    close(found["mean_abs_prob_diff"], expected["mean_abs_prob_diff"])
    shares = dict(zip(inputs["taus"], expected["F_tau"]))
    close(found["extreme_token_fraction"]["2"], shares[2.0])
    close(found["extreme_token_fraction"]["1.2"], shares[1.2])
    close(ratio["mean"], (trainer - sampler).exp().mean().item())


def test_route_disagreement(world: Any) -> None:
    (case,) = golden_cases("routing_discrepancy")
    inputs, expected = case["inputs"], case["expected"]
    sampler, trainer = torch.tensor(inputs["idx_infer"]), torch.tensor(inputs["idx_train"])
    assert measures.differing(sampler, trainer).tolist() == expected["d"]
    sums = measures.Disagreement(3, 2)
    for half in (slice(0, 2), slice(2, 4)):
        sums.add(sampler[half], trainer[half])
    found = sums.finish(world)
    close(found["router"], expected["router_mismatch_fraction"])
    close(found["token"], expected["token_any_mismatch_fraction"])
    close(found["sequence_mean"], tensor(expected["sequence_mean_routers"]).mean().item())
    close(found["sequence_mean_experts"], tensor(expected["sequence_mean_experts"]).mean().item())
    pairs = sum(expected["router_histogram_0..K"])
    close(found["histogram"], [count / pairs for count in expected["router_histogram_0..K"]])
    differs = torch.tensor(expected["d"]) > 0
    close(found["by_layer"], differs.double().mean(0).tolist())
    shares = [(differs.sum(-1) == n).double().mean() for n in range(4)]
    close(found["token_histogram"], torch.stack(shares).tolist())
    assert sum(found["sequence_histogram"]) == 2


def test_predictive_routes() -> None:
    for case in golden_cases("pr2"):
        inputs, expected = case["inputs"], case["expected"]
        hidden, old, new = (
            tensor(inputs[name])
            for name in ("h_old", "router_logits_old", "router_logits_current")
        )
        predictor = tensor(inputs["w_predictor"]).requires_grad_()
        spec = RouterSpec("softmax_of_chosen", old.shape[1], inputs["top_k"])
        chosen = predicted_route(spec, hidden, old, predictor)
        assert chosen.tolist() == expected["idx_predicted"]
        loss = predictor_loss(hidden, old, new, predictor)
        close(loss.detach(), expected["loss"])
        if "dloss_dw" in expected:
            loss.backward()
            close(predictor.grad, expected["dloss_dw"])
            close(spec.weights(new, chosen), expected["gates_update_replay"])
            stepped = predictor.detach() - 0.5 * predictor.grad
            close(predictor_loss(hidden, old, new, stepped), expected["loss_after_sgd_lr0.5"])


def test_advantages() -> None:
    names = {
        "std": "grpo_unbiased_std",
        "population": "grpo_population_std",
        "none": "drgrpo_mean_only",
        "rloo": "rloo",
    }
    for case in golden_cases("group_advantage"):
        for norm, name in names.items():
            found = advantages.group_advantages(tensor(case["inputs"]["rewards"]), norm)
            close(found, case["expected"][name])
    for case in golden_cases("overlong_shaping"):
        inputs = case["inputs"]
        found = advantages.overlong_penalty(
            tensor(inputs["lengths"]), inputs["max_len"], inputs["cache"]
        )
        close(found, case["expected"]["penalty"])
    assert advantages.group_advantages(tensor([1.0]), "std").tolist() == [0.0]


def test_values(world: Any) -> None:
    for case in golden_cases("ppo_gae_value"):
        inputs, expected = case["inputs"], case["expected"]
        rewards, old, mask, new = (
            tensor(inputs[name]) for name in ("rewards", "values_old", "mask", "values_new")
        )
        found, returns = advantages.gae(rewards, old, mask, inputs["gamma"], inputs["lambda"])
        close(found, expected["advantages_at_mask"])
        close(returns, expected["returns_at_mask"])
        live = mask > 0
        whitened = torch.zeros_like(found).masked_scatter(live, whiten(found[live], world))
        close(whitened, expected["whitened_at_mask"])
        critic = Returns(found[live], returns[live], old[live])
        loss = critic.loss(new[live], inputs["cliprange_value"], int(live.sum()))
        close(loss, expected["value_loss"])


def test_a_sequence_without_loss_tokens_contributes_nothing() -> None:
    tokens = Tokens(torch.tensor([0, 0, 2]), 3)
    logp, old = tensor([-1.0, -2.0, -0.5]).requires_grad_(), tensor([-1.1, -1.8, -0.5])
    advantage = tensor([1.0, 5.0, -1.0])
    for loss in (
        losses.sequence_surrogate(logp - old, tokens, advantage, 0.2, 0.2),
        losses.geometric_mean(logp - old, tokens, advantage, 0.4, 0.4),
    ):
        assert loss.terms[1] == 0 and (loss.terms[[0, 2]] != 0).all()


def test_sequences_that_have_moved_away_are_left_out() -> None:
    tokens = Tokens(torch.tensor([0, 0, 1, 1]), 2)
    logp, old = tensor([-3.0, -3.0, -3.0, -3.0]), tensor([-1.0, -1.0, -1.0, -1.0])
    kept = off_policy_keep(logp, old, tokens, tensor([-1.0, 1.0]), 1.5)
    assert kept.tolist() == [0, 0, 1, 1]
    assert off_policy_keep(logp, old, tokens, tensor([-1.0, 1.0]), 2.5).tolist() == [1, 1, 1, 1]
