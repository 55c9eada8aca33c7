//! RSPO's router-shift weight: how far the routers have moved away from the experts that were
//! executed.

use crate::router::softmax;
use crate::train::real::Real;

/// Router probabilities below this count as this.
const LEAST_PROBABILITY: f64 = 1e-8;

/// `exp(−mean |Δ ln p|)` over all layers and the experts `ids [layers · K]` executed at the old
/// weights, from old and new router logits `[layers · E]` of one token; above 0 to 1.
pub fn gamma<T: Real>(old: &[T], new: &[T], ids: &[u16], layers: usize) -> f64 {
    let layers = layers.max(1);
    let (experts, top_k) = (old.len() / layers, ids.len() / layers);
    if experts == 0 || top_k == 0 {
        return 1.0;
    }
    let rows = old.chunks_exact(experts).zip(new.chunks_exact(experts));
    let mut total = 0.0;
    for ((old, new), ids) in rows.zip(ids.chunks_exact(top_k)) {
        let (old, new) = (softmax(old), softmax(new));
        let log = |p: &[T], e: u16| {
            let p = p.get(usize::from(e)).map_or(0.0, |p| p.to_f64());
            libm::log(p.max(LEAST_PROBABILITY))
        };
        total += ids.iter().map(|&e| (log(&new, e) - log(&old, e)).abs()).sum::<f64>();
    }
    libm::exp(-total / ids.len() as f64)
}
