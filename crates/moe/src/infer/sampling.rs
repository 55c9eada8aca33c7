//! Sampling one token from logits, and the log-probability reported for it.

use super::model::Model;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

/// Below this temperature sampling is greedy, as in SGLang.
const GREEDY: f32 = 1e-6;

/// Checked sampling parameters of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sampling {
    /// Maximum number of tokens to sample.
    pub(crate) max_new_tokens: usize,
    /// Stop tokens cannot be sampled before this many output tokens.
    pub(crate) min_new_tokens: usize,
    pub(crate) temperature: f32,
    /// Number of most likely tokens considered; `None` means all.
    pub(crate) top_k: Option<usize>,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    /// Random seed; `None` means one derived from the engine's seed.
    pub(crate) seed: Option<u64>,
    /// Random stream: the index of this sequence among the `n` of one request.
    pub(crate) stream: u64,
    pub(crate) stop_token_ids: Arc<[u32]>,
    /// Stop strings; they require a tokenizer.
    pub(crate) stop: Arc<[String]>,
    /// Disables both end-of-sequence and stop tokens.
    pub(crate) ignore_eos: bool,
}

/// A sampled token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Drawn {
    pub(crate) token: u32,
    /// `ln p` under the softmax at the sampling temperature (1 when greedy), before top-k, top-p
    /// and min-p.
    pub(crate) logprob: f32,
}

impl Sampling {
    /// Draws output token `position`. The random number depends only on seed, stream and position,
    /// so a sequence is reproducible whatever else runs. Returns `None` if a logit is NaN.
    pub(crate) fn draw(
        &self,
        model: &Model,
        logits: &[f32],
        seed: u64,
        position: usize,
    ) -> Option<Drawn> {
        let greedy = self.temperature < GREEDY;
        let scale = if greedy { 1.0 } else { 1.0 / self.temperature };
        let mut p = logits.to_vec();
        let normaliser = model.probabilities(&mut p, scale);
        if normaliser.is_nan() {
            return None;
        }
        let index = if greedy {
            largest(logits)
        } else {
            let mut rng = ChaCha8Rng::seed_from_u64(self.seed.unwrap_or(seed));
            rng.set_stream(self.stream);
            // One f64 consumes two 32-bit words.
            rng.set_word_pos(2 * position as u128);
            let u: f64 = rng.random();
            if self.top_k.is_none_or(|k| k >= p.len()) && self.top_p >= 1.0 && self.min_p <= 0.0 {
                invert(p.iter().copied().enumerate(), u)
            } else {
                invert(self.kept(&p).into_iter(), u)
            }
        };
        let logit = logits.get(index)?;
        let token = u32::try_from(index).ok()?;
        Some(Drawn { token, logprob: (logit * scale - normaliser).min(0.0) })
    }

    /// Tokens that pass top-k, top-p and min-p, most likely first; at least one.
    fn kept(&self, p: &[f32]) -> Vec<(usize, f32)> {
        let mut order: Vec<(usize, f32)> = p.iter().copied().enumerate().collect();
        order.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        order.truncate(self.top_k.unwrap_or(usize::MAX).max(1));
        let least = order.first().map_or(0.0, |&(_, most)| most * self.min_p);
        let mut before = 0.0;
        let cut = order.iter().position(|&(_, p)| {
            let out = before > f64::from(self.top_p) || p < least;
            before += f64::from(p);
            out
        });
        order.truncate(cut.unwrap_or(usize::MAX).max(1));
        order
    }
}

fn largest(values: &[f32]) -> usize {
    let mut best = (0, f32::NEG_INFINITY);
    for (i, &v) in values.iter().enumerate() {
        if v > best.1 {
            best = (i, v);
        }
    }
    best.0
}

/// The index at which the running sum of weights exceeds `u` times their total.
fn invert(weights: impl Iterator<Item = (usize, f32)> + Clone, u: f64) -> usize {
    let total: f64 = weights.clone().map(|(_, w)| f64::from(w)).sum();
    let mut left = u * total;
    let mut last = 0;
    for (index, weight) in weights {
        if weight > 0.0 {
            last = index;
            left -= f64::from(weight);
            if left < 0.0 {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Weights;
    use crate::infer::WeightFormat;
    use crate::infer::model::tests::small_config;

    fn sampling() -> Sampling {
        Sampling {
            max_new_tokens: 1,
            min_new_tokens: 0,
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            seed: Some(3),
            stream: 0,
            stop_token_ids: Arc::default(),
            stop: Arc::default(),
            ignore_eos: false,
        }
    }

    fn model() -> Model {
        Model::build(&Weights::random(small_config(1), 1), WeightFormat::F32).unwrap()
    }

    #[test]
    fn sampled_frequencies_match_reported_log_probs() {
        let model = model();
        let logits = [0.5, 0.3, 0.2].map(libm::logf);
        let mut counts = [0u32; 3];
        for position in 0..20_000 {
            let drawn = sampling().draw(&model, &logits, 0, position).unwrap();
            counts[drawn.token as usize] += 1;
            let expected = logits[drawn.token as usize];
            assert!((drawn.logprob - expected).abs() < 1e-6);
        }
        for (count, p) in counts.iter().zip([0.5, 0.3, 0.2]) {
            assert!((f64::from(*count) / 20_000.0 - p).abs() < 0.015);
        }
    }

    #[test]
    fn top_k_top_p_and_min_p_keep_the_most_likely_tokens() {
        let p = [0.1, 0.4, 0.3, 0.2];
        let ids = |s: &Sampling| s.kept(&p).iter().map(|k| k.0).collect::<Vec<_>>();
        assert_eq!(ids(&Sampling { top_k: Some(2), ..sampling() }), [1, 2]);
        assert_eq!(ids(&Sampling { top_p: 0.5, ..sampling() }), [1, 2]);
        assert_eq!(ids(&Sampling { min_p: 0.6, ..sampling() }), [1, 2]);
        assert_eq!(ids(&Sampling { top_p: 1e-9, ..sampling() }), [1]);
    }

    #[test]
    fn temperature_zero_is_greedy_and_reports_unscaled_log_softmax() {
        let greedy = Sampling { temperature: 0.0, ..sampling() };
        let drawn = greedy.draw(&model(), &[1.0, 3.0, 3.0], 0, 0).unwrap();
        let expected = 3.0 - libm::logf(libm::expf(1.0) + 2.0 * libm::expf(3.0));
        assert_eq!(drawn.token, 1);
        assert!((drawn.logprob - expected).abs() < 1e-6);
        assert!(greedy.draw(&model(), &[1.0, f32::NAN], 0, 0).is_none());
    }

    #[test]
    fn same_seed_stream_and_position_draw_the_same_token() {
        let model = model();
        let logits: Vec<f32> = (0..1000u16).map(|i| f32::from(i % 7)).collect();
        let draw = |s: &Sampling, at| s.draw(&model, &logits, 0, at).unwrap().token;
        assert_eq!(draw(&sampling(), 5), draw(&sampling(), 5));
        assert_ne!(draw(&sampling(), 5), draw(&sampling(), 6));
        assert_ne!(draw(&sampling(), 5), draw(&Sampling { stream: 1, ..sampling() }, 5));
    }
}
