//! Choosing cases by name.

/// Whether `name` matches `pattern`, in which `*` stands for any text.
pub fn matches_glob(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((before, after)) => name.strip_prefix(before).is_some_and(|rest| {
            rest.char_indices()
                .map(|(at, _)| rest.split_at(at).1)
                .chain([""])
                .any(|rest| matches_glob(after, rest))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn star_matches_any_text() {
        assert!(matches_glob("*", "sglang_i32_delta") && matches_glob("", ""));
        assert!(matches_glob("sglang_*", "sglang_i32_delta"));
        assert!(matches_glob("*_full", "vllm_u8_full"));
        assert!(matches_glob("*u8*", "vllm_u8_full") && !matches_glob("*u8", "vllm_u8_full"));
        assert!(!matches_glob("spill", "spill_2"));
    }
}
