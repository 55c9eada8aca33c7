"""Checks of the reference itself: every analytic gradient against finite differences."""

from __future__ import annotations

import numpy as np

import cases
import divergence
import objective
import predictor
import replay
import values
import vectors
import whole_model
from basics import bounded_exp, numerical_gradient


def run() -> int:
    """Runs every check; returns the number of derivatives compared."""
    return sum(
        check()
        for check in (
            _objective, _sequence_forms, _divergence, _routers, _replay, _predictor, _value_loss,
            _whole_model, _coverage, _options,
        )
    )  # fmt: skip


def _same(name: str, analytic, numeric, scale: float = 1.0) -> int:
    analytic, numeric = np.asarray(analytic), np.asarray(numeric)
    error = np.abs(analytic - numeric).max() / max(scale, 1.0, np.abs(analytic).max())
    assert error < 1e-6, f"{name}: analytic and numerical gradients differ by {error:.1e}"
    return analytic.size


def _objective() -> int:
    """Every case, with everything under a stop-gradient kept fixed."""
    batches = cases.batches()
    compared = 0
    for name, which, changed in cases.step_cases():
        batch, settings = batches[which], cases.DEFAULTS | changed
        # The gradient of k3_plus is by definition that of k2.
        plus = {"kl_estimator": "k2"} if settings["kl_estimator"] == "k3_plus" else {}

        def loss(new):
            moved = objective.moved(batch, new)
            return objective.evaluate(settings | plus, moved, batch.new).loss

        found = objective.evaluate(settings, batch)
        numeric = numerical_gradient(loss, batch.new)
        compared += _same(name, found.gradient, numeric, abs(found.loss))
    return compared


def _sequence_forms() -> int:
    """Without weights on single tokens, the token forms of GSPO and GMPO have the value and the
    gradient of the sequence forms, in which every token affects the ratio of the sequence."""
    batch = cases.batches()["ordinary"]
    compared = 0

    def gspo(settings, change, advantage):
        ratio = bounded_exp(change.mean())
        clipped = np.clip(ratio, 1 - settings["clip_low"], 1 + settings["clip_high"])
        return max(-advantage * ratio, -advantage * clipped)

    def gmpo(settings, change, advantage):
        sign = np.sign(advantage)
        held = np.clip(change, -settings["clip_low"], settings["clip_high"])
        k = sign * np.minimum(sign * change, sign * held)
        return -advantage * bounded_exp(k.mean())

    for loss, form in (("gspo", gspo), ("gmpo", gmpo)):
        for correction in ({}, cases.CORRECTIONS[2], cases.CORRECTIONS[6]):
            settings = cases.DEFAULTS | cases.base(loss) | correction
            result = objective.evaluate(settings, batch)

            def value(new):
                total = 0.0
                for i, live in enumerate(batch.mask):
                    if live.any():
                        change = (new - batch.old)[i, live]
                        weight = result.weights[i, live][0]
                        total += weight * form(settings, change, batch.advantage[i])
                return total / len(batch.mask)

            assert abs(value(batch.new) - result.loss) < 1e-14, loss
            compared += _same(loss, result.gradient, numerical_gradient(value, batch.new))
    return compared


def _divergence() -> int:
    new = -np.linspace(0.5, 3.0, 7)
    reference = new - np.array([0.05, -0.7, 2.0, -2.0, 9.0, -4.0, 25.0])
    old = new - np.array([0.3, -0.4, 0.05, 0.2, -0.1, 0.0, 0.1])
    compared = 0
    for estimator in ("k1", "k2", "k3"):
        for ratio in (False, True) if estimator == "k3" else (False,):

            def total(at):
                log_ratio = at - old if ratio else None
                return divergence.penalty(estimator, at, reference, log_ratio)[0].sum()

            log_ratio = new - old if ratio else None
            slope = divergence.penalty(estimator, new, reference, log_ratio)[1]
            compared += _same(estimator, slope, numerical_gradient(total, new))
    # k3_plus is defined as the value of k3 with the gradient of k2.
    plus, two, three = (divergence.penalty(e, new, reference) for e in ("k3_plus", "k2", "k3"))
    assert (plus[0] == three[0]).all() and (plus[1] == two[1]).all()
    return compared


def _routers() -> int:
    file = vectors.router_vectors()
    compared = 0
    for case in file["cases"]:
        router = vectors.ROUTERS[case["name"]]
        for kind in ("own", "replayed"):
            found = case["expected"][kind]
            rows = zip(file["logits"], file["upstream"], found["experts"], found["gradient"])
            for logits, upstream, chosen, gradient in rows:

                def value(at):
                    return float(router.gates(at, chosen) @ upstream[chosen])

                compared += _same(case["name"], gradient, numerical_gradient(value, logits))
        # Replaying a router's own choice changes nothing.
        own = case["expected"]["own"]
        for logits, chosen, gates in zip(file["logits"], own["experts"], own["gates"]):
            assert (router.gates(logits, chosen) == gates).all()
    return compared


def _replay() -> int:
    file = vectors.replay_vectors()
    layer, spec = replay.Layer(**file["layer"]), vectors.Router("softmax_renormalised", 2)
    compared = 0
    for case in file["cases"]:
        chosen = case["expected"]["experts"]
        for name, gradient in case["expected"]["gradient"].items():

            def value(at):
                weights = vars(layer) | ({} if name == "x" else {name: at})
                x = at if name == "x" else file["x"]
                y = replay.forward(spec, replay.Layer(**weights), x, chosen)[0]
                return float((y * file["upstream"]).sum())

            at = file["x"] if name == "x" else getattr(layer, name)
            compared += _same(name, gradient, numerical_gradient(value, at))
    replayed = file["cases"][1]["expected"]["gradient"]
    assert all((replayed[name][2] == 0).all() for name in ("router", "gate", "up", "down"))
    return compared


def _predictor() -> int:
    file = vectors.predictor_vectors()
    compared = 0
    for case in file["cases"]:

        def value(w):
            return predictor.loss(file["hidden"], file["old"], file["new"], w)

        gradient = numerical_gradient(value, case["w"])
        compared += _same(case["name"], case["expected"]["gradient"], gradient)
        assert case["expected"]["loss_after_step"] < case["expected"]["loss"]
    return compared


def _value_loss() -> int:
    file = vectors.value_vectors()
    mask, compared = file["mask"], 0
    for case in file["cases"]:

        def value(new):
            returns = case["expected"]["returns"][mask]
            loss, _ = values.value_loss(new[mask], file["old"][mask], returns, file["value_clip"])
            return float(loss.mean())

        gradient = numerical_gradient(value, file["new"])
        compared += _same(case["name"], case["expected"]["gradient"], gradient)
    return compared


def _whole_model() -> int:
    """The largest derivative of every tensor against differences, and an expert layer against
    ``replay.py``, which computes token by token."""
    file = vectors.whole_model_cases.vectors()
    step = file["cases"][3]
    given = step["inputs"]
    parameters = whole_model.draw(vectors.whole_model_cases.SEED)
    answer = slice(given["prompt_len"] - 1, None)
    compared = 0
    for name, gradient in step["expected"]["grads"].items():
        place = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)

        def loss(value):
            moved = parameters | {name: parameters[name].copy()}
            moved[name][place] = value
            new = whole_model.forward(moved, given["input_ids"], recorded=given["idx_infer"])
            bounds = given["advantage"], given["eps_low"], given["eps_high"]
            return whole_model.policy_loss(new.logprobs[answer], given["logp_old"][answer], *bounds)

        numeric = numerical_gradient(loss, np.array(parameters[name][place]))
        compared += _same(name, gradient[place], numeric)

    at = "model.layers.0."
    spec = vectors.Router("softmax_renormalised", whole_model.TOP_K)
    parts = (whole_model.experts(parameters, at, part) for part in ("gate", "up", "down"))
    layer = replay.Layer(parameters[f"{at}mlp.gate.weight"], *parts)
    x = np.random.default_rng(1).standard_normal((5, whole_model.HIDDEN))
    y, logits, chosen = replay.forward(spec, layer, x)
    found = whole_model.expert_layer(parameters, at, x, None, None)
    assert np.array_equal(found[2], chosen)
    return compared + _same("layer", found[0], y) + _same("router", found[1], logits)


def _coverage() -> int:
    """The ordinary batch has tokens on both sides of every bound that can apply."""
    batches = cases.batches()
    for loss in vectors.OPTIONS["policy_loss"]:
        found = objective.evaluate(cases.DEFAULTS | cases.base(loss), batches["ordinary"])
        shares = found.diagnostics["clipped_low"], found.diagnostics["clipped_high"]
        # cispo's lower clip of 1 never applies, and sapo has no clip.
        sides = {"cispo": (1,), "sapo": ()}.get(loss, (0, 1))
        assert all(0 < shares[side] < 1 for side in sides), (loss, shares)
    for correction in cases.CORRECTIONS[1:]:
        found = objective.evaluate(
            cases.DEFAULTS | cases.base("grpo") | correction, batches["ordinary"]
        )
        assert 0 < found.diagnostics["corrected"] < 1, correction
    for threshold, expected in ((None, 0), (0.1, 1)):
        settings = cases.DEFAULTS | cases.base("grpo") | {"off_policy_delta": threshold}
        gradient = objective.evaluate(settings, batches["ordinary"]).gradient
        empty = [i for i in (0, 1, 2, 4) if not gradient[i].any()]
        assert len(empty) == expected, (threshold, empty)
    # Some tokens are at the floor of the router shift and some are not.
    shifted = cases.DEFAULTS | cases.base("rspo")
    floored = objective.evaluate(shifted, batches["ordinary"]).diagnostics["gamma_floored"]
    assert 0 < floored < 1
    return 0


def _options() -> int:
    """Every option is used by at least one case."""
    seen = [cases.DEFAULTS | settings for _, _, settings in cases.step_cases()]
    for key, options in vectors.OPTIONS.items():
        assert {settings[key] for settings in seen} == set(options), key
    return 0
