//! How the model is run over a batch, and what it says.

use super::batch::Routes;

/// How to run the model over a batch.
#[derive(Debug, Clone, Copy)]
pub struct Pass<'a, T> {
    /// Which sequences of the batch.
    pub sequences: &'a [usize],
    /// Routes to execute; tokens without a row use the model's own choice. `None` = always own.
    pub replay: Option<&'a Routes>,
    /// Temperature of log-probs and entropy, > 0.
    pub temperature: f64,
    /// Most tokens whose activations are held at once, all lanes together.
    pub micro_batch_tokens: usize,
    /// Factor on the balance loss of each token; 0 outside supervised training.
    pub balance_per_token: f64,
    /// Weights of a value head, `[hidden + 1]` with the bias last.
    pub value_head: Option<&'a [T]>,
    /// Whether router logits are wanted.
    pub router_logits: bool,
    /// Router inputs are wanted of so many rows of each sequence at most ([`spread`]).
    pub router_inputs: usize,
    /// Added to the router logits `[N, layers, experts]`: a stand-in for another engine's noise.
    #[cfg(test)]
    pub router_shift: Option<&'a [f64]>,
}

impl<'a, T> Pass<'a, T> {
    /// Own routes, temperature 1, nothing beside log-probs.
    pub fn new(sequences: &'a [usize]) -> Self {
        Self {
            sequences,
            replay: None,
            temperature: 1.0,
            micro_batch_tokens: usize::MAX,
            balance_per_token: 0.0,
            value_head: None,
            router_logits: false,
            router_inputs: 0,
            #[cfg(test)]
            router_shift: None,
        }
    }
}

/// What the model says about one sequence of `T` tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceOutput<T> {
    /// Its number in the batch.
    pub sequence: usize,
    /// Log-prob of each scored token given those before, nats; 0.0 elsewhere. `[T]`
    pub logprobs: Vec<T>,
    /// Entropy of the distribution each scored token was drawn from, nats; 0.0 elsewhere. `[T]`
    pub entropy: Vec<T>,
    /// Value of what comes before each scored token; 0.0 elsewhere, empty without a value head.
    /// `[T]`
    pub values: Vec<T>,
    /// Executed experts `[T, layers, top_k]`.
    pub routes: Vec<u16>,
    /// Router logits `[T, layers, experts]`; empty if not wanted.
    pub router_logits: Vec<T>,
    /// Router inputs of the rows [`spread`] names, `[rows, layers, hidden]`.
    pub router_inputs: Vec<T>,
}

/// `dL/dlogp` and `dL/dvalue` of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenGradient<T> {
    /// By the log-probs. `[T]`
    pub logprobs: Vec<T>,
    /// By the values `[T]`; empty without a value head.
    pub values: Vec<T>,
}

impl<T> From<Vec<T>> for TokenGradient<T> {
    fn from(logprobs: Vec<T>) -> Self {
        Self { logprobs, values: Vec::new() }
    }
}

/// Gradient of the loss of one sequence, from what the model says about it. Called on worker
/// threads.
pub type LossGradient<'a, T> = dyn Fn(&SequenceOutput<T>) -> TokenGradient<T> + Sync + 'a;

/// At most `limit` of the first `rows` numbers, evenly spread.
pub fn spread(rows: usize, limit: usize) -> impl Iterator<Item = usize> {
    let count = rows.min(limit);
    (0..count).map(move |i| i * rows / count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_spread_evenly_and_never_twice() {
        assert_eq!(spread(3, 10).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(spread(10, 4).collect::<Vec<_>>(), [0, 2, 5, 7]);
        assert_eq!(spread(0, 4).count() + spread(4, 0).count(), 0);
    }
}
