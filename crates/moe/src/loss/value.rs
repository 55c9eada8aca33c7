//! Advantages from a value head, and its loss.

/// Advantages and returns of one sequence, from the values at the weights of the rollout. `[T]`
/// each, 0 for tokens without a loss.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimates {
    /// Generalised advantage estimates (GAE).
    pub advantages: Vec<f64>,
    /// Targets of the value head: advantage plus old value.
    pub returns: Vec<f64>,
}

/// Advantages over the loss tokens of one sequence. Tokens without a loss are passed over, so a
/// discount counts loss tokens only. `rewards`, `values` and `mask` are `[T]`, `rates` are the
/// discount γ and the decay λ.
pub fn estimates(rewards: &[f64], values: &[f64], mask: &[bool], rates: (f64, f64)) -> Estimates {
    let (gamma, lambda) = rates;
    let mut advantages = vec![0.0; mask.len()];
    let mut returns = vec![0.0; mask.len()];
    let (mut next_value, mut carried) = (0.0, 0.0);
    let slots = advantages.iter_mut().zip(&mut returns);
    let tokens = slots.zip(rewards.iter().zip(values).zip(mask)).rev();
    for ((advantage, due), ((&reward, &value), _)) in tokens.filter(|(_, (_, m))| **m) {
        carried = reward + gamma * next_value - value + gamma * lambda * carried;
        next_value = value;
        *advantage = carried;
        *due = carried + value;
    }
    Estimates { advantages, returns }
}

/// Shifts and scales advantages to mean 0 and unbiased variance 1; one entry per loss token of the
/// whole batch.
pub fn whiten(advantages: &mut [&mut f64]) {
    let count = advantages.len() as f64;
    let mean = advantages.iter().map(|a| **a).sum::<f64>() / count.max(1.0);
    let squares: f64 = advantages.iter().map(|a| (**a - mean).powi(2)).sum();
    let scale = 1.0 / (squares / (count - 1.0).max(1.0) + 1e-8).sqrt();
    for advantage in advantages {
        **advantage = (**advantage - mean) * scale;
    }
}

/// `½ max((V − R)², (clip(V) − R)²)` of one token and its derivative with respect to V; `clip` keeps
/// V within `range` of the old value.
pub fn loss(value: f64, old: f64, due: f64, range: f64) -> (f64, f64) {
    let held = value.clamp(old - range, old + range);
    let (free, clipped) = ((value - due).powi(2), (held - due).powi(2));
    // If the clipped value has the larger loss, the loss does not depend on the new value.
    if clipped > free { (clipped / 2.0, 0.0) } else { (free / 2.0, value - due) }
}
