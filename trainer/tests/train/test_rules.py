"""Which hyperparameters are refused, with the same messages as the orchestrator's."""

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

RULES = Path(__file__).resolve().parents[3] / "crates" / "handoff" / "src" / "rules.rs"


def sentences_of_rust(source: str) -> set[str]:
    """String literals that say what to do, joined over their line breaks."""
    source = re.sub(r"#\[expect\(.*?\)\]", "", source, flags=re.DOTALL)
    found = re.findall(r'"((?:[^"\\]|\\.)*)"', source, re.DOTALL)
    joined = (re.sub(r"\\\n\s*", "", text).replace('\\"', '"') for text in found)
    # Formats of values have braces, names of fields no spaces.
    return {text for text in joined if " " in text and "{" not in text}


def sentences_of_python(source: str) -> set[str]:
    strings = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant))
    return {text for text in strings if isinstance(text, str)}


def test_messages_equal_the_orchestrators() -> None:
    if not RULES.exists():
        pytest.skip("the orchestrator's source is absent")
    wanted = sentences_of_rust(RULES.read_text())
    lacking = wanted - sentences_of_python(Path(rules.__file__).read_text())
    assert len(wanted) > 25 and not lacking


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"clip_low": 1.0}, "`clip_low` = 1 is not usable: use a number between 0 and 1"),
        ({"betas": [0.5, 1.0]}, "`betas` = [0.5, 1] is not usable: use two numbers from 0"),
        ({"learning_rate": -1e-7}, "`learning_rate` = -0.0000001 is not usable"),
        (
            {"policy_loss": "ppo", "off_policy_delta": 0.5},
            "`off_policy_delta` = 0.5 is not usable: it needs one advantage per sequence",
        ),
        (
            {"routing_replay": "predictive"},
            "`mini_steps` = 1 is not usable: the predictor learns from the second mini step on",
        ),
        ({"policy_loss": "rspo"}, "`aggregation` = token-mean is not usable"),
        (
            {"kl_coefficient": 1.0, "kl_estimator": "k2", "kl_unbiased": True},
            "`kl_unbiased` = true is not usable",
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
    assert str(caught.value).startswith("hyperparameter `clip_low` = 0 ")
    assert str(caught.value).count(" is not usable: ") == 3
