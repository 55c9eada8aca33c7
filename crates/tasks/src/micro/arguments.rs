//! Helpers for the tables in `catalog`.
//!
//! The `draw_*` functions draw arguments on which the expressions of a family often differ; the
//! others compute results that do not fit one line of a table.

use super::draw::Draw;
use super::families::{i, int, list, nums, text};
use super::value::Value;

pub(super) fn count(args: &[Value], n: usize) -> Option<usize> {
    usize::try_from(int(args, n)?).ok()
}

pub(super) fn sorted(args: &[Value]) -> Option<Vec<i64>> {
    let mut items = nums(args, 0)?;
    items.sort_unstable();
    Some(items)
}

pub(super) fn unique(args: &[Value]) -> Option<Vec<i64>> {
    let mut items = sorted(args)?;
    items.dedup();
    Some(items)
}

pub(super) fn guard(args: &[Value], test: fn(i64, i64) -> bool) -> Option<Value> {
    let (x, n) = (int(args, 0)?, int(args, 1)?);
    i(if test(x, n) { n } else { x })
}

pub(super) fn joined(args: &[Value], mark: &str) -> Option<String> {
    let items = list(args, 0)?;
    let words: Option<Vec<_>> = (0..items.len()).map(|n| text(items, n)).collect();
    Some(words?.join(mark))
}

pub(super) fn radix(args: &[Value], base: u32) -> Option<Value> {
    i(i64::from_str_radix(text(args, 0)?, base).ok()?)
}

/// `str.center`: of an odd amount of padding, the extra space goes to the left only if the width is
/// odd, as in `CPython`.
pub(super) fn center(value: &str, width: usize) -> String {
    let rest = width.saturating_sub(value.len());
    let left = rest / 2 + (rest & width & 1);
    format!("{}{value}{}", " ".repeat(left), " ".repeat(rest - left))
}

pub(super) fn title(value: &str) -> String {
    let mut inside = false;
    let mut out = String::with_capacity(value.len());
    for c in value.chars() {
        out.push(if inside { c.to_ascii_lowercase() } else { c.to_ascii_uppercase() });
        inside = c.is_ascii_alphabetic();
    }
    out
}

pub(super) fn swap_case(value: &str) -> String {
    value
        .chars()
        .map(
            |c| {
                if c.is_ascii_uppercase() { c.to_ascii_lowercase() } else { c.to_ascii_uppercase() }
            },
        )
        .collect()
}

/// `str.islower` or `str.isupper`: `value` has a letter, and none in the `other` case.
pub(super) fn one_case(value: &str, other: fn(&u8) -> bool) -> bool {
    value.bytes().any(|c| c.is_ascii_alphabetic()) && !value.bytes().any(|c| other(&c))
}

/// Draws numbers, and a limit that often equals one of them.
pub(super) fn draw_numbers_and_limit(d: &mut Draw<'_>) -> Vec<Value> {
    vec![d.numbers(1, 7), d.int(2, 6)]
}

pub(super) fn draw_mixed_case(d: &mut Draw<'_>) -> Value {
    let word = d.word();
    let (head, tail) = word.split_at_checked(2).unwrap_or((word, ""));
    Value::Text(match d.below(3) {
        0 => format!("{head}{}", tail.to_ascii_uppercase()),
        1 => format!("{}{tail}", head.to_ascii_uppercase()),
        _ => title(word),
    })
}

/// Draws letters joined by commas, dashes, colons and dots.
pub(super) fn draw_punctuated(d: &mut Draw<'_>) -> Value {
    let mut out = d.choose(&["a", "b", "c"]).to_owned();
    for letter in ["x", "y", "z"].into_iter().take(2 + d.below(2)) {
        out.push_str(d.choose(&[",", "-", ":", "."]));
        out.push_str(letter);
    }
    Value::Text(out)
}

pub(super) fn draw_prices(d: &mut Draw<'_>) -> Value {
    let keys = ["a", "b", "c", "d"];
    let first = d.below(2);
    let count = 2 + d.below(2);
    Value::Table(
        keys.iter()
            .skip(first)
            .take(count)
            .map(|key| ((*key).to_owned(), d.number(1, 9)))
            .collect(),
    )
}

/// Draws a date, written `YYYY-MM-DD`.
pub(super) fn draw_date(d: &mut Draw<'_>) -> Value {
    Value::Text(format!("20{:02}-{:02}-{:02}", d.number(10, 29), d.number(1, 12), d.number(1, 28)))
}

/// Draws two to four binary digits, which are valid in every base.
pub(super) fn draw_binary_digits(d: &mut Draw<'_>) -> Value {
    let mut out = String::from("1");
    for _ in 0..=d.below(3) {
        out.push_str(d.choose(&["0", "1"]));
    }
    Value::Text(out)
}

/// Draws a word, and a text that is often a part of it.
pub(super) fn draw_word_and_affix(d: &mut Draw<'_>) -> Vec<Value> {
    let word = d.word();
    let part = match d.below(5) {
        0 => word.get(..2),
        1 => word.get(2..),
        2 => word.get(1..3),
        3 => Some(word),
        _ => Some(d.word()),
    };
    vec![Value::Text(word.to_owned()), Value::Text(part.unwrap_or(word).to_owned())]
}

/// Draws letters in one of several cases, digits, or both.
pub(super) fn draw_letters_or_digits(d: &mut Draw<'_>) -> Value {
    let word = d.word();
    Value::Text(match d.below(5) {
        0 => word.to_ascii_uppercase(),
        1 => word.to_owned(),
        2 => title(word),
        3 => d.number(10, 99).to_string(),
        _ => format!("{word}{}", d.number(1, 9)),
    })
}
