"""PR2, predictive routing replay, arXiv 2606.00395: a linear prediction of the new router logits.

    eq (4), (5)  p_hat = softmax(z_old + h_old W)
    eq (6)       experts of the rollout = TopK(p_hat)          weights stay those of z alone
    eq (7), (8)  L = mean_t KL( sg[softmax(z_new)] || softmax(z_old + h_old W) )

with router inputs h and logits z at the weights of the rollout (old) and now (new). Only W has a
gradient: ``h_old^T (p_hat - p_new) / T``.
"""

from __future__ import annotations

import numpy as np

from basics import Array, softmax


def loss(hidden: Array, old: Array, new: Array, w: Array) -> float:
    """Mean loss over tokens; ``hidden [T, d]``, logits ``[T, E]``, ``w [d, E]``."""
    target, guess = softmax(new), softmax(old + hidden @ w)
    return float((target * (np.log(target) - np.log(guess))).sum(axis=1).mean())


def gradient(hidden: Array, old: Array, new: Array, w: Array) -> Array:
    """``dL/dW`` ``[d, E]``."""
    return hidden.T @ (softmax(old + hidden @ w) - softmax(new)) / len(hidden)
