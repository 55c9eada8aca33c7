"""Which hyperparameters are refused, and that the messages are the orchestrator's."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest
from model_families import hyperparameters

from orchestrate_trainer import rules
from orchestrate_trainer.settings import Hyperparameters, Unusable

SOURCE = Path(__file__).resolve().parents[3] / "crates" / "handoff" / "src"
DECLARATION = SOURCE / "algorithm" / "declaration.rs"


def sentences_of_rust(source: str) -> set[str]:
    """String literals that say what a value must be, joined over their line breaks."""
    found = re.findall(r'"((?:[^"\\]|\\.)*)"', source, re.DOTALL)
    joined = (re.sub(r"\\\n\s*", "", text).replace('\\"', '"') for text in found)
    return {text for text in joined if text.startswith("must be ")}


def sentences_of_python(source: str) -> set[str]:
    strings = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant))
    return {text for text in strings if isinstance(text, str)}


def test_every_rule_has_the_orchestrators_message() -> None:
    if not DECLARATION.exists():
        pytest.skip("the orchestrator's source is absent")
    wanted = sentences_of_rust(DECLARATION.read_text())
    missing = wanted - sentences_of_python(Path(rules.__file__).read_text())
    assert len(wanted) > 15 and not missing


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"clip_low": 1.0}, "`clip_low` = 1: must be above 0 and below 1"),
        ({"betas": [0.5, 1.0]}, "`betas` = [0.5, 1]: must be at least 0 and below 1"),
        ({"learning_rate": -1e-7}, "`learning_rate` = -0.0000001: must be from 0 to 100"),
        (
            {"policy_loss": "ppo", "off_policy_delta": 0.5},
            "`off_policy_delta` = 0.5: must be left out: it needs one advantage per sequence",
        ),
        (
            {"routing_replay": "predictive"},
            "`mini_steps` = 1: must be at least 2 with routing_replay",
        ),
        ({"policy_loss": "rspo"}, '`aggregation` = token-mean: must be "seq-mean-token-mean"'),
        (
            {"kl_coefficient": 1.0, "kl_estimator": "k2", "kl_unbiased": True},
            "`kl_unbiased` = true: must be false",
        ),
    ],
)
def test_values_are_formatted_as_the_orchestrator_formats_them(
    changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Unusable, match=re.escape(sentence)):
        Hyperparameters.parse(hyperparameters(**changed))


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(Unusable) as caught:
        Hyperparameters.parse(hyperparameters(clip_low=0.0, mini_steps=0, max_grad_norm=0.0))
    assert str(caught.value).startswith("hyperparameter `clip_low` = 0: ")
    assert str(caught.value).count(": must be ") == 3
