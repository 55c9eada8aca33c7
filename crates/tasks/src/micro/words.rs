//! The words that function and module names consist of. All splits use the same words.

/// First halves of function names.
pub(crate) const VERBS: &[&str] = &[
    "add", "ask", "build", "call", "check", "clean", "cut", "draw", "drop", "fetch", "fill",
    "find", "fix", "get", "give", "hold", "keep", "list", "load", "make", "map", "mark", "match",
    "mix", "move", "open", "pack", "pick", "plan", "pull", "push", "put", "rank", "read", "save",
    "scan", "send", "set", "show", "sort", "split", "store", "take", "tell", "watch", "trim",
    "turn", "use", "view", "wrap",
];

/// Second halves of function names.
pub(crate) const NOUNS: &[&str] = &[
    "age", "area", "band", "bank", "base", "bill", "block", "board", "body", "box", "bus", "cake",
    "camp", "case", "cell", "chart", "city", "class", "clock", "club", "code", "cost", "crew",
    "crop", "cup", "deal", "deck", "dish", "disk", "farm", "fee", "field", "file", "food", "form",
    "frame", "fund", "gate", "gift", "goal", "grade", "grid", "group", "hall", "home", "host",
    "hour", "house", "item", "job", "key", "lane", "lens", "level", "loan", "lock", "lot", "map",
    "mark", "menu", "mile", "mode", "name", "node", "note", "order", "page", "pair", "path",
    "phase", "plant", "point", "pool", "port", "post", "price", "queue", "rate", "role", "room",
    "route", "rule", "score", "seat", "shape", "shelf", "shift", "sign", "site", "size", "slot",
    "stage", "step", "stock", "stop", "table", "tag", "task", "team", "term", "ticket", "tool",
    "town", "track", "trade", "trip", "unit", "user", "vote", "week",
];

/// Module names.
pub(crate) const FILES: &[&str] = &["app", "core", "data", "lib", "main", "tools", "util", "work"];

/// Parameter names of integers.
pub(crate) const INTS: &[&str] = &["a", "b", "k", "n", "x", "y"];
/// Parameter names of strings.
pub(crate) const TEXTS: &[&str] = &["line", "text", "word"];
/// Parameter names of lists of integers.
pub(crate) const NUMS: &[&str] = &["nums", "rows", "vals"];
/// Parameter names of lists of strings.
pub(crate) const LISTS: &[&str] = &["items", "names", "parts"];
/// Parameter names of dictionaries.
pub(crate) const TABLES: &[&str] = &["counts", "prices", "stats"];
/// Parameter names of dates.
pub(crate) const DATES: &[&str] = &["date", "day"];

/// Whether the pair of verb `v` and noun `n` (indices) is reserved for evaluation. One pair in five
/// is, and every word occurs in both kinds of pair, so only the pair is unseen, never the word.
pub(crate) fn is_held_out(v: usize, n: usize) -> bool {
    (v + 2 * n) % 5 == 3
}

/// All words that occur in identifiers and module names, sorted and without duplicates.
pub fn words() -> Vec<&'static str> {
    let mut all: Vec<_> = [VERBS, NOUNS, FILES, INTS, TEXTS, NUMS, LISTS, TABLES, DATES]
        .into_iter()
        .flatten()
        .copied()
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_has_seen_and_held_out_pairs() {
        for v in 0..VERBS.len() {
            assert!(
                (0..NOUNS.len()).any(|n| is_held_out(v, n))
                    && (0..NOUNS.len()).any(|n| !is_held_out(v, n))
            );
        }
        for n in 0..NOUNS.len() {
            assert!(
                (0..VERBS.len()).any(|v| is_held_out(v, n))
                    && (0..VERBS.len()).any(|v| !is_held_out(v, n))
            );
        }
        assert!((170..=190).contains(&words().len()), "{}", words().len());
    }
}
