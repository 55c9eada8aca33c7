//! Shortening of observations.

/// `text`, without its middle if it has more than `max_chars` characters.
pub(crate) fn truncate_middle(text: String, max_chars: usize) -> String {
    let count = text.chars().count();
    if count <= max_chars {
        return text;
    }
    let (head, tail) = head_and_tail(&text, count, max_chars);
    format!("{head}\n[{} characters cut]\n{tail}", count - max_chars)
}

/// The first and the last characters of a text of `count` characters, `max_chars` in total.
pub(super) fn head_and_tail(text: &str, count: usize, max_chars: usize) -> (String, String) {
    let head = text.chars().take(max_chars.div_ceil(2)).collect();
    let tail = text.chars().skip(count.saturating_sub(max_chars / 2)).collect();
    (head, tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_observations_keep_head_and_tail() {
        let text = format!("{}{}", "é".repeat(10), "z".repeat(10));
        assert_eq!(truncate_middle(text, 8), "éééé\n[12 characters cut]\nzzzz");
        assert_eq!(truncate_middle("short".to_owned(), 8), "short");
    }
}
