"""How token terms become the loss of an optimizer step.

With B sequences of n_i loss tokens each, the factor on a token of sequence i is

| mode | factor | source |
|---|---|---|
| ``token-mean`` | 1 / sum n_i | DAPO, arXiv 2503.14476, eq (8) and (12) |
| ``seq-mean-token-mean`` | 1 / (B n_i) | GRPO, arXiv 2402.03300, eq (3) |
| ``seq-mean-token-sum`` | 1 / B | MiniRL, arXiv 2512.01374 |
| ``token-sum-norm`` | 1 / (B C) | Dr. GRPO, arXiv 2503.20783, with a constant C |

The denominators are those of the whole step and count masked-out tokens too, so neither
micro-batches nor corrections change the objective.
"""

from __future__ import annotations

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-norm")


def factor(mode: str, counts: list[int], sequence: int, norm_tokens: float) -> float:
    """Factor on each token term of ``sequence``, where sequences have ``counts`` loss tokens."""
    if mode == "token-mean":
        return 1 / sum(counts)
    if mode == "seq-mean-token-mean":
        return 1 / (len(counts) * max(counts[sequence], 1))
    if mode == "seq-mean-token-sum":
        return 1 / len(counts)
    if mode == "token-sum-norm":
        return 1 / (len(counts) * norm_tokens)
    raise ValueError(mode)
