//! Random choices that are the same on every machine and in every later version.
//!
//! The invariant: every choice is reduced here from a 64-bit word of `ChaCha8`, so a change to the
//! range algorithms of a random-number library cannot change a task.

use super::value::Value;
use super::words;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Words used as text arguments, each of four letters.
const TEXTS: &[&str] = &[
    "bird", "boat", "book", "card", "coin", "desk", "door", "fish", "flag", "game", "gold", "hill",
    "lamp", "leaf", "moon", "park", "rain", "ring", "road", "rock", "rose", "sand", "seed", "ship",
    "shop", "snow", "song", "star", "tree", "wind",
];

/// A source of random choices.
#[derive(Debug)]
pub(crate) struct Draw<'a> {
    rng: &'a mut ChaCha8Rng,
}

/// The generator for `seed` and `purpose`; different purposes give independent sequences.
pub(crate) fn generator(seed: u64, purpose: &str) -> ChaCha8Rng {
    let mut hasher = blake3::Hasher::new_derive_key("orchestrate micro tasks 1");
    hasher.update(&seed.to_le_bytes());
    hasher.update(purpose.as_bytes());
    ChaCha8Rng::from_seed(*hasher.finalize().as_bytes())
}

impl<'a> Draw<'a> {
    /// A source that takes its words from `rng`.
    pub(crate) fn new(rng: &'a mut ChaCha8Rng) -> Self {
        Self { rng }
    }

    /// An index below `n`; 0 if `n` is 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        let wide = u128::from(self.rng.next_u64()) * (n as u128);
        usize::try_from(wide >> 64).unwrap_or(0)
    }

    /// True in `percent` of 100 cases.
    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// One of `items`, which must not be empty.
    pub(crate) fn choose<T: Copy + Default>(&mut self, items: &[T]) -> T {
        items.get(self.below(items.len())).copied().unwrap_or_default()
    }

    /// An integer in `low..=high`.
    pub(crate) fn number(&mut self, low: i64, high: i64) -> i64 {
        let span = usize::try_from(high - low).unwrap_or(0) + 1;
        low + i64::try_from(self.below(span)).unwrap_or(0)
    }

    /// An integer in `low..=high`, as a value.
    pub(crate) fn int(&mut self, low: i64, high: i64) -> Value {
        Value::Int(self.number(low, high))
    }

    /// A word of four letters.
    pub(crate) fn word(&mut self) -> &'static str {
        self.choose(TEXTS)
    }

    /// A word as a value.
    pub(crate) fn text(&mut self) -> Value {
        Value::Text(self.word().to_owned())
    }

    /// Three or four integers in `low..=high`.
    pub(crate) fn numbers(&mut self, low: i64, high: i64) -> Value {
        let count = 3 + self.below(2);
        Value::List((0..count).map(|_| self.int(low, high)).collect())
    }

    /// `least` to `most` words.
    pub(crate) fn words(&mut self, least: usize, most: usize) -> Value {
        let count = least + self.below(most - least + 1);
        Value::List((0..count).map(|_| self.text()).collect())
    }

    /// A name made of a verb and a noun: a pair reserved for evaluation if `held_out`, else one for
    /// training.
    pub(crate) fn function_name(&mut self, held_out: bool) -> String {
        loop {
            let (v, n) = (self.below(words::VERBS.len()), self.below(words::NOUNS.len()));
            if words::is_held_out(v, n) == held_out
                && let (Some(verb), Some(noun)) = (words::VERBS.get(v), words::NOUNS.get(n))
            {
                return format!("{verb}_{noun}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_draws_never_change() {
        let mut rng = generator(7, "train");
        let mut draw = Draw::new(&mut rng);
        let got: Vec<_> = (0..8).map(|_| draw.below(1000)).collect();
        assert_eq!(got, [739, 686, 274, 484, 26, 962, 116, 983]);
    }
}
