//! Options and outputs of a pass of the model over a batch.

use super::batch::Routes;

/// Options of one pass of the model over a batch.
#[derive(Debug, Clone, Copy)]
pub struct Pass<'a, T> {
    /// Indices of the sequences to run.
    pub sequences: &'a [usize],
    /// Routes to replay; tokens without a row use the model's own choice. `None` disables replay.
    pub replay: Option<&'a Routes>,
    /// Temperature of log-probs and entropy, > 0.
    pub temperature: f64,
    /// Maximum number of tokens whose activations are held at once, over all lanes.
    pub micro_batch_tokens: usize,
    /// Factor on the balance loss of each token; 0 outside supervised training.
    pub balance_per_token: f64,
    /// Weights of the value head, `[hidden + 1]` with the bias last; `None` to skip it.
    pub value_head: Option<&'a [T]>,
    /// Whether to return router logits.
    pub router_logits: bool,
    /// Maximum number of rows per sequence whose router inputs are returned ([`spread`]).
    pub router_inputs: usize,
    /// Added to the router logits, `[N, layers, experts]`, to simulate the noise of another engine.
    #[cfg(test)]
    pub router_shift: Option<&'a [f64]>,
}

impl<'a, T> Pass<'a, T> {
    /// Default options: no replay, temperature 1, log-probs and entropy only.
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

/// Output of the model for one sequence of `T` tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceOutput<T> {
    /// Index of the sequence in the batch.
    pub sequence: usize,
    /// Log-prob of each scored token given the tokens before it, in nats; 0.0 elsewhere. `[T]`
    pub logprobs: Vec<T>,
    /// Entropy of the predicted distribution at each scored token, in nats; 0.0 elsewhere. `[T]`
    pub entropy: Vec<T>,
    /// Value of the prefix before each scored token `[T]`; 0.0 elsewhere; empty without a value
    /// head.
    pub values: Vec<T>,
    /// Executed experts `[T, layers, top_k]`.
    pub routes: Vec<u16>,
    /// Router logits `[T, layers, experts]`; empty if not requested.
    pub router_logits: Vec<T>,
    /// Router inputs of the rows selected by [`spread`], `[rows, layers, hidden]`.
    pub router_inputs: Vec<T>,
}

/// `dL/dlogp` and `dL/dvalue` of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenGradient<T> {
    /// Gradient with respect to the log-probs. `[T]`
    pub logprobs: Vec<T>,
    /// Gradient with respect to the values `[T]`; empty without a value head.
    pub values: Vec<T>,
}

impl<T> From<Vec<T>> for TokenGradient<T> {
    fn from(logprobs: Vec<T>) -> Self {
        Self { logprobs, values: Vec::new() }
    }
}

/// Computes the gradient of the loss of one sequence from its output. Called on worker threads.
pub type LossGradient<'a, T> = dyn Fn(&SequenceOutput<T>) -> TokenGradient<T> + Sync + 'a;

/// At most `limit` evenly spaced indices below `rows`.
pub fn spread(rows: usize, limit: usize) -> impl Iterator<Item = usize> {
    let count = rows.min(limit);
    (0..count).map(move |i| i * rows / count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_rows_are_even_and_distinct() {
        assert_eq!(spread(3, 10).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(spread(10, 4).collect::<Vec<_>>(), [0, 2, 5, 7]);
        assert_eq!(spread(0, 4).count() + spread(4, 0).count(), 0);
    }
}
