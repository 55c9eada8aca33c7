"""Gates of every router family, own and replayed, against worked numbers in float64."""

from __future__ import annotations

from typing import Any

from needs import golden_cases

import torch  # isort: skip
import torch.nn.functional as F

from orchestrate_trainer.routers import RouterSpec

KINDS = {
    "softmax_renorm": "softmax_of_chosen",
    "softmax_norenorm": "softmax",
    "logits_softmax": "softmax_of_chosen",
    "sigmoid_bias_group": "sigmoid",
    "dsv2_group": "softmax",
}


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, tensor(expected), rtol=1e-9, atol=1e-9)


def test_gates() -> None:
    cases = golden_cases("r3_gating")
    assert {case["inputs"]["kind"] for case in cases} == set(KINDS)
    for case in cases:
        inputs, expected = case["inputs"], case["expected"]
        logits = tensor(inputs["logits_train"]).requires_grad_()
        spec = RouterSpec(
            kind=KINDS[inputs["kind"]],
            experts=logits.shape[1],
            top_k=inputs["top_k"],
            scale=inputs.get("scale", 1.0),
            renormalise=inputs.get("norm", True),
            groups=inputs.get("n_group", 1),
            kept_groups=inputs.get("topk_group", 1),
        )
        bias = tensor(inputs["bias"]) if "bias" in inputs else None
        own = spec.select(logits, bias)
        assert own.tolist() == expected["idx_own"], case["name"]
        close(spec.weights(logits, own).detach(), expected["gates_own"])
        recorded = torch.tensor(inputs["idx_infer"])
        chosen = torch.where((recorded >= 0).all(-1, keepdim=True), recorded, own)
        assert chosen.tolist() == expected["idx_effective"]
        gates = spec.weights(logits, chosen)
        close(gates.detach(), expected["gates_replay"])
        (gates * tensor(inputs["dL_dg_dense"]).gather(1, chosen)).sum().backward()
        close(logits.grad, expected["dL_dlogits"])


def test_a_layer_with_replayed_experts() -> None:
    for case in golden_cases("moe_layer_r3"):
        inputs, expected = case["inputs"], case["expected"]
        names = ("x", "w_router", "w_gate", "w_up", "w_down")
        x, router, gate, up, down = (tensor(inputs[name]).requires_grad_() for name in names)
        spec = RouterSpec("softmax_of_chosen", len(router), inputs["top_k"])
        logits = x @ router.T
        recorded = inputs["idx_infer"]
        chosen = spec.select(logits) if recorded is None else torch.tensor(recorded)
        weights = spec.weights(logits, chosen)
        hidden = F.silu(torch.einsum("nd,nkfd->nkf", x, gate[chosen]))
        hidden = hidden * torch.einsum("nd,nkfd->nkf", x, up[chosen])
        y = torch.einsum("nkf,nkdf,nk->nd", hidden, down[chosen], weights)
        loss = (y * tensor(inputs["cotangent"])).sum()
        close(loss.detach(), expected["loss"])
        loss.backward()
        pairs = ((x, "x"), (router, "router"), (gate, "w_gate"), (up, "w_up"), (down, "w_down"))
        for value, name in pairs:
            close(value.grad, expected[f"grad_{name}"])


def test_the_lower_expert_wins_a_tie() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]])
    for kind in ("softmax", "softmax_of_chosen", "sigmoid"):
        assert RouterSpec(kind, 5, 2).select(logits).tolist() == [[1, 2]]
