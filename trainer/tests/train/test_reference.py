"""Every option of the objective, every router family and every measure against the golden vectors
of the reference implementation, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip
import torch.nn.functional as F
from golden_vectors import vectors
from model_families import hyperparameters
from option_pairs import aggregated_losses, base, is_allowed
from torch import Tensor

from orchestrate_trainer import advantages, losses, measures
from orchestrate_trainer.corrections import Tokens, correction, off_policy_keep
from orchestrate_trainer.losses import Totals
from orchestrate_trainer.objective import Critic, Objective, Shift
from orchestrate_trainer.prediction import predicted_route, predictor_loss
from orchestrate_trainer.routers import FAMILIES, RouterSpec, log_router_probs
from orchestrate_trainer.settings import CHOICES, Hyperparameters
from orchestrate_trainer.values import Returns, whiten

OBJECTIVE = vectors("objective")


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: Any, expected: Any, name: str = "") -> None:
    found = found if isinstance(found, Tensor) else tensor(found)
    expected = expected if isinstance(expected, Tensor) else tensor(expected)
    torch.testing.assert_close(
        found.detach().double(),
        expected,
        rtol=1e-11,
        atol=1e-11,
        msg=lambda text: f"{name}: {text}",
    )


def settings_of(changed: dict[str, Any]) -> Hyperparameters:
    return Hyperparameters.parse(hyperparameters(**(OBJECTIVE["defaults"] | changed)))


class Rows:
    """The loss tokens of a batch ``[S, T]`` in one row, as a micro-batch."""

    def __init__(self, name: str) -> None:
        batch = OBJECTIVE["batches"][name]
        self.mask = torch.tensor(batch["mask"])
        for key in ("new", "old", "sampler", "reference", "gamma", "token_advantage"):
            setattr(self, key, tensor(batch[key])[self.mask])
        self.new.requires_grad_()
        sequences = len(self.mask)
        owner = torch.arange(sequences).unsqueeze(1).expand_as(self.mask)[self.mask]
        self.tokens = Tokens(owner, sequences)
        self.micro: Any = SimpleNamespace(
            live=True,
            owner=owner,
            sequences=[None] * sequences,
            rollout=self.sampler,
            advantages=tensor(batch["advantage"]),
        )

    def spread(self, row: Tensor) -> Tensor:
        return torch.zeros(self.mask.shape, dtype=row.dtype).masked_scatter(self.mask, row)

    def evaluate(self, settings: Hyperparameters) -> tuple[Tensor, Objective]:
        objective = Objective(settings)
        nothing = torch.zeros_like(self.old)
        log_gamma = self.gamma.log().view(-1, 1, 1)
        loss = objective.loss(
            self.micro,
            self.new,
            self.old,
            Totals(len(self.mask), int(self.mask.sum()), settings.loss_norm_tokens),
            self.reference if settings.kl_coefficient > 0 else None,
            Shift(log_gamma, torch.zeros_like(log_gamma))
            if settings.router_shift != "none"
            else None,
            # The value loss, tested below, is 0 here.
            Critic(nothing, Returns(self.token_advantage, nothing, nothing))
            if settings.values
            else None,
        )
        return loss, objective


@pytest.mark.parametrize("case", OBJECTIVE["cases"], ids=lambda case: case["name"])
def test_loss_gradient_and_diagnostics(case: dict[str, Any], world: Any) -> None:
    settings, expected, name = settings_of(case["settings"]), case["expected"], case["name"]
    rows = Rows(case["batch"])
    loss, objective = rows.evaluate(settings)
    loss.backward()
    close(loss, expected["loss"], name)
    close(rows.spread(rows.new.grad), expected["gradient"], name)
    weight, _ = correction(
        rows.old,
        rows.sampler,
        rows.tokens,
        settings.importance_correction,
        settings.importance_level,
        settings.importance_low,
        settings.importance_high,
    )
    close(rows.spread(weight), expected["weights"], name)
    found: Any = objective.finish(world)
    ratio, rollout = found["ratio"], found["rollout_ratio"]
    for key, value in {
        "clipped_low": ratio["clipped_low"],
        "clipped_high": ratio["clipped_high"],
        "ratio_mean": ratio["mean"],
        "ratio_max": ratio["max"],
        "weight_mean": rollout["weight_mean"],
        "corrected": rollout["corrected"],
    }.items():
        close(value, expected[key], f"{name}: {key}")
    if settings.router_shift != "none":
        close(found["router_shift"]["mean"], expected["gamma_mean"], name)
        close(found["router_shift"]["floored"], expected["gamma_floored"], name)


def combinations() -> list[dict[str, Any]]:
    """Every combination of options that has to have a vector of its own, refused ones included."""
    found = aggregated_losses()
    for loss in CHOICES["policy_loss"]:
        alone = base(loss)
        found += (
            alone | {"aggregation": aggregation, "dual_clip": 3.0}
            for aggregation in CHOICES["aggregation"]
        )
        found += (alone | {"router_shift": shift} for shift in CHOICES["router_shift"])
        found += (
            alone | {"kl_coefficient": 0.3, "kl_estimator": estimator, "kl_unbiased": unbiased}
            for estimator in CHOICES["kl_estimator"]
            for unbiased in (False, True)
        )
        found.append(alone | {"off_policy_delta": 0.1})
    return found


def test_every_option_that_is_allowed_has_a_vector() -> None:
    def key(h: Hyperparameters) -> tuple[Any, ...]:
        corrects, diverges = h.importance_correction != "none", h.kl_coefficient > 0
        return (
            (h.policy_loss, h.aggregation, h.router_shift),
            (h.importance_correction, h.importance_level if corrects else None),
            (h.kl_estimator, h.kl_unbiased) if diverges else None,
            (h.dual_clip is not None, h.off_policy_delta is not None),
        )

    have = {key(settings_of(case["settings"])) for case in OBJECTIVE["cases"]}
    wanted = 0
    for changed in combinations():
        if not is_allowed(changed):
            continue
        wanted += 1
        assert key(settings_of(changed)) in have, f"no vector in tests/reference for {changed}"
    assert wanted > 150


def test_a_token_that_a_correction_masks_has_no_gradient_in_any_loss() -> None:
    checked = 0
    for loss in CHOICES["policy_loss"]:
        for how in ("mis", "icepop"):
            changed = {
                "policy_loss": loss,
                "aggregation": "seq-mean-token-mean",
                "clip_low": 0.9,
                "clip_high": 9.0,
                "importance_correction": how,
                "importance_low": 0.8,
                "importance_high": 1.5,
            }
            if not is_allowed(changed):
                continue
            settings = settings_of(changed)
            rows = Rows("ordinary")
            total, _ = rows.evaluate(settings)
            total.backward()
            weight, _ = correction(rows.old, rows.sampler, rows.tokens, how, "token", 0.8, 1.5)
            assert (weight == 0).any()
            assert torch.equal(rows.new.grad != 0, weight > 0), (loss, how)
            checked += 1
    assert checked >= 10


@pytest.mark.parametrize("case", vectors("divergence")["cases"], ids=lambda case: case["name"])
def test_divergence(case: dict[str, Any]) -> None:
    file = vectors("divergence")
    new = tensor(file["new"]).requires_grad_()
    log_ratio = new - tensor(file["old"]) if case["settings"]["kl_unbiased"] else None
    value = losses.kl_penalty(
        new, tensor(file["reference"]), case["settings"]["kl_estimator"], log_ratio
    )
    close(value, case["expected"]["value"])
    value.sum().backward()
    close(new.grad, case["expected"]["gradient"])


def test_every_estimator_has_a_vector() -> None:
    seen = {case["settings"]["kl_estimator"] for case in vectors("divergence")["cases"]}
    assert seen == set(CHOICES["kl_estimator"])


KINDS = {
    "softmax_renormalised": "softmax_of_chosen",
    "logits_then_softmax": "softmax_of_chosen",
    "softmax": "softmax",
    "softmax_grouped": "softmax",
    "sigmoid_bias": "sigmoid",
    "sigmoid_bias_plain": "sigmoid",
}


def spec_of(router: dict[str, Any], experts: int) -> tuple[RouterSpec, Tensor | None]:
    spec = RouterSpec(
        kind=KINDS[router["family"]],  # type: ignore[arg-type]
        experts=experts,
        top_k=router["top_k"],
        scale=router["scale"],
        renormalise=router["family"] != "sigmoid_bias_plain",
        groups=router["groups"],
        kept_groups=router["kept_groups"],
    )
    return spec, tensor(router["bias"]) if router["bias"] else None


@pytest.mark.parametrize("case", vectors("routers")["cases"], ids=lambda case: case["name"])
def test_gates_of_own_and_replayed_experts(case: dict[str, Any]) -> None:
    file = vectors("routers")
    for kind in ("own", "replayed"):
        expected = case["expected"][kind]
        logits = tensor(file["logits"]).requires_grad_()
        spec, bias = spec_of(case["router"], logits.shape[1])
        chosen = torch.tensor(expected["experts"])
        if kind == "own":
            assert spec.select(logits, bias).tolist() == expected["experts"]
        gates = spec.weights(logits, chosen)
        close(gates, expected["gates"])
        (gates * tensor(file["upstream"]).gather(1, chosen)).sum().backward()
        close(logits.grad, expected["gradient"])


def test_every_router_family_has_a_vector(folders: dict[str, Any], world: Any) -> None:
    """The vectors include a router like that of each model family that can be trained."""
    from orchestrate_trainer.policy import ModelOptions, load_policy

    def features(spec: RouterSpec) -> tuple[Any, ...]:
        return spec.kind, spec.renormalise, spec.groups > 1

    seen = {features(spec_of(case["router"], 6)[0]) for case in vectors("routers")["cases"]}
    assert len(folders) == len(FAMILIES)
    for folder in folders.values():
        spec = load_policy(folder, ModelOptions(), world).routing.spec
        assert features(spec) in seen, spec
    # For DeepSeek-V3 without `norm_topk_prob`.
    assert ("sigmoid", False, False) in seen


@pytest.mark.parametrize("case", vectors("replay")["cases"], ids=lambda case: case["name"])
def test_a_layer_of_experts_with_own_and_replayed_routes(case: dict[str, Any]) -> None:
    file, expected = vectors("replay"), case["expected"]
    x = tensor(file["x"]).requires_grad_()
    weights = {name: tensor(file["layer"][name]).requires_grad_() for name in file["layer"]}
    spec = RouterSpec("softmax_of_chosen", len(weights["router"]), file["top_k"])
    logits = x @ weights["router"].T
    close(logits, expected["logits"])
    chosen = spec.select(logits)
    if case["recorded"] is not None:
        chosen = torch.tensor(case["recorded"])
    assert chosen.tolist() == expected["experts"]
    hidden = F.silu(torch.einsum("nd,nkfd->nkf", x, weights["gate"][chosen]))
    hidden = hidden * torch.einsum("nd,nkfd->nkf", x, weights["up"][chosen])
    gates = spec.weights(logits, chosen)
    y = torch.einsum("nkf,nkdf,nk->nd", hidden, weights["down"][chosen], gates)
    close(y, expected["y"])
    (y * tensor(file["upstream"])).sum().backward()
    for name, value in {"x": x, **weights}.items():
        close(value.grad, expected["gradient"][name], name)


@pytest.mark.parametrize("case", vectors("router_shift")["cases"], ids=lambda case: case["name"])
def test_router_shift(case: dict[str, Any]) -> None:
    file = vectors("router_shift")
    old, new = tensor(file["old"]), tensor(file["new"])
    spec, _ = spec_of(case["router"], old.shape[-1])
    executed = torch.tensor(file["executed"])
    logs = (log_router_probs(spec, logits, executed) for logits in (new, old))
    shift, raw = losses.router_shift(*logs, 0.8)
    close(raw, case["expected"]["gamma"])
    close(shift.exp(), raw.clamp(min=0.8))


def test_advantages() -> None:
    names = {"std": "std", "population": "population_std", "none": "none", "rloo": "rloo"}
    for group in vectors("advantages")["groups"]:
        assert set(names.values()) == group["expected"].keys()
        for norm, name in names.items():
            found = advantages.group_advantages(tensor(group["rewards"]), norm)
            close(found, group["expected"][name], group["name"])
    for case in vectors("advantages")["overlong"]:
        found = advantages.overlong_penalty(
            tensor(case["lengths"]), case["max_tokens"], case["cache_tokens"]
        )
        close(found, case["expected"])
    assert advantages.group_advantages(tensor([1.0]), "std").tolist() == [0.0]


@pytest.mark.parametrize("case", vectors("values")["cases"], ids=lambda case: case["name"])
def test_values(case: dict[str, Any], world: Any) -> None:
    file, expected = vectors("values"), case["expected"]
    live = torch.tensor(file["mask"])
    rewards, old, new = (tensor(file[name]) for name in ("rewards", "old", "new"))
    found, returns = advantages.gae(
        rewards, old, live.double(), case["gae_gamma"], case["gae_lambda"]
    )
    close(found, expected["advantages"])
    close(returns, expected["returns"])
    whitened = torch.zeros_like(found).masked_scatter(live, whiten(found[live], world))
    close(whitened, expected["whitened"])
    new.requires_grad_()
    critic = Returns(found[live], returns[live], old[live])
    loss = critic.loss(new[live], file["value_clip"], int(live.sum()))
    close(loss, expected["loss"])
    loss.backward()
    close(new.grad, expected["gradient"])


@pytest.mark.parametrize("case", vectors("predictor")["cases"], ids=lambda case: case["name"])
def test_predictor(case: dict[str, Any]) -> None:
    file, expected = vectors("predictor"), case["expected"]
    hidden, old, new = (tensor(file[name]) for name in ("hidden", "old", "new"))
    predictor = tensor(case["w"]).requires_grad_()
    spec = RouterSpec("softmax_of_chosen", old.shape[1], file["top_k"])
    assert predicted_route(spec, hidden, old, predictor).tolist() == expected["experts"]
    loss = predictor_loss(hidden, old, new, predictor)
    close(loss, expected["loss"])
    loss.backward()
    close(predictor.grad, expected["gradient"])
    stepped = predictor.detach() - file["step"] * predictor.grad
    close(predictor_loss(hidden, old, new, stepped), expected["loss_after_step"])


def same(found: Any, expected: Any, name: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key in expected:
            same(found[key], expected[key], f"{name}.{key}")
    else:
        close(found, expected, name)


def test_mismatch(world: Any) -> None:
    file = vectors("measures")
    sums = measures.Mismatch()
    # In two parts, which must not change the result.
    for part in (slice(0, 1), slice(1, 3)):
        rows = file["train"][part]
        owner = [i for i, row in enumerate(rows) for _ in row]
        train, engine = (
            tensor([value for row in file[key][part] for value in row])
            for key in ("train", "engine")
        )
        sums.add(train, engine, Tokens(torch.tensor(owner), len(rows)))
    mismatch, ratio = sums.finish(world)
    same(mismatch, file["expected"]["mismatch"], "mismatch")
    same(ratio, file["expected"]["rollout_ratio"], "rollout_ratio")


def test_disagreement_and_load(world: Any) -> None:
    file = vectors("measures")
    sums, load = measures.Disagreement(3, file["top_k"]), measures.Load(3, file["experts"])
    for engine, train in zip(file["engine_routes"], file["train_routes"]):
        one = Tokens(torch.zeros(len(engine), dtype=torch.long), 1)
        valid = torch.ones(len(engine), dtype=torch.bool)
        sums.add(torch.tensor(engine), torch.tensor(train), valid, one)
        load.add(torch.tensor(engine))
    same(sums.finish(world), file["expected"]["disagreement"], "disagreement")
    found, expected = load.finish(world), file["expected"]["expert_load"]
    close(found["expert_load_entropy"], expected["entropy"])
    close(found["expert_load"], expected["curve"])


def test_the_divergence_is_the_mean_of_k3_over_the_engines_tokens() -> None:
    q, p = tensor([0.5, 0.3, 0.15, 0.05]), tensor([0.4, 0.35, 0.05, 0.2])
    close((q * measures.k3(p.log(), q.log())).sum(), (q * (q / p).log()).sum())


@pytest.mark.parametrize("case", vectors("optimizer")["cases"], ids=lambda case: case["name"])
def test_optimizer_steps(case: dict[str, Any]) -> None:
    file = vectors("optimizer")
    settings = Hyperparameters.parse(hyperparameters(**case["settings"]))
    parameter = torch.nn.Parameter(tensor(file["start"]))
    optimizer = torch.optim.AdamW([parameter], lr=0.0)
    for number, (gradient, expected) in enumerate(zip(file["gradients"], case["expected"])):
        parameter.grad = tensor(gradient)
        norm = torch.nn.utils.clip_grad_norm_([parameter], settings.max_grad_norm)
        optimizer.param_groups[0].update(
            lr=settings.rate(number + 1),
            betas=settings.betas,
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
        )
        optimizer.step()
        close(norm, expected["norm"])
        close(parameter, expected["parameters"])


def test_a_sequence_without_loss_tokens_contributes_nothing() -> None:
    tokens = Tokens(torch.tensor([0, 0, 2]), 3)
    logp, old = tensor([-1.0, -2.0, -0.5]).requires_grad_(), tensor([-1.1, -1.8, -0.5])
    advantage = tensor([1.0, 5.0, -1.0])
    for loss in (
        losses.sequence_surrogate(logp - old, tokens, advantage, 0.2, 0.2),
        losses.geometric_mean(logp - old, tokens, advantage, 0.4, 0.4),
    ):
        assert loss.terms.shape == (3,) and (loss.terms != 0).all()


def test_sequences_that_have_moved_away_are_left_out() -> None:
    tokens = Tokens(torch.tensor([0, 0, 1, 1]), 2)
    logp, old = tensor([-3.0, -3.0, -3.0, -3.0]), tensor([-1.0, -1.0, -1.0, -1.0])
    kept = off_policy_keep(logp, old, tokens, tensor([-1.0, 1.0]), 1.5)
    assert kept.tolist() == [0, 0, 1, 1]
    assert off_policy_keep(logp, old, tokens, tensor([-1.0, 1.0]), 2.5).tolist() == [1, 1, 1, 1]
