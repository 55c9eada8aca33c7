//! Text for people.

use std::fmt::Display;

/// A number with what it counts, e.g. `1 task` or `2 tasks`.
pub fn counted<N>(count: N, noun: &str) -> String
where
    N: Copy + Display + PartialEq + From<u8>,
{
    let ending = if count == N::from(1) { "" } else { "s" };
    format!("{count} {noun}{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_singular() {
        assert_eq!([0_u32, 1, 2].map(|n| counted(n, "step")), ["0 steps", "1 step", "2 steps"]);
    }
}
