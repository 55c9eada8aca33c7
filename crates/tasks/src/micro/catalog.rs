//! The bug families. Each entry of `choices` is a phrase, the expression that it asks for, and what
//! the function returns with that expression. `environments/micro/README.md` lists the phrases.

use super::arguments::{
    center, count, draw_binary_digits, draw_date, draw_letters_or_digits, draw_mixed_case,
    draw_numbers_and_limit, draw_prices, draw_punctuated, draw_word_and_affix, guard, joined,
    one_case, radix, sorted, swap_case, title, unique,
};
use super::families::{Choice, Family, b, cut, i, int, ints, list, nums, s, table, text, texts};
use super::value::Value;
use super::words::{DATES, INTS, LISTS, NUMS, TABLES, TEXTS};

const fn c(phrase: &'static str, code: &'static str, run: fn(&[Value]) -> Option<Value>) -> Choice {
    Choice { phrase, code, run }
}

/// All bug families, those for training first.
pub(crate) const FAMILIES: &[Family] = &[
    Family {
        name: "arith",
        held_out: false,
        params: &[INTS, INTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.int(2, 12), d.int(2, 6)],
        choices: &[
            c("return the sum of {0} and {1}", "{0} + {1}", |a| i(int(a, 0)? + int(a, 1)?)),
            c("return the difference of {0} and {1}", "{0} - {1}", |a| i(int(a, 0)? - int(a, 1)?)),
            c("return the product of {0} and {1}", "{0} * {1}", |a| i(int(a, 0)? * int(a, 1)?)),
            c("return the quotient of {0} and {1}", "{0} // {1}", |a| {
                i(int(a, 0)?.div_euclid(int(a, 1)?))
            }),
            c("return the remainder of {0} and {1}", "{0} % {1}", |a| {
                i(int(a, 0)?.rem_euclid(int(a, 1)?))
            }),
            c("", "{1} - {0}", |a| i(int(a, 1)? - int(a, 0)?)),
        ],
    },
    Family {
        name: "compare",
        held_out: false,
        params: &[INTS, INTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.int(1, 6), d.int(1, 6)],
        choices: &[
            c("tell whether {0} is above {1}", "{0} > {1}", |a| b(int(a, 0)? > int(a, 1)?)),
            c("tell whether {0} is below {1}", "{0} < {1}", |a| b(int(a, 0)? < int(a, 1)?)),
            c("tell whether {0} is at least {1}", "{0} >= {1}", |a| b(int(a, 0)? >= int(a, 1)?)),
            c("tell whether {0} is at most {1}", "{0} <= {1}", |a| b(int(a, 0)? <= int(a, 1)?)),
            c("tell whether {0} is equal to {1}", "{0} == {1}", |a| b(int(a, 0)? == int(a, 1)?)),
            c("tell whether {0} is other than {1}", "{0} != {1}", |a| b(int(a, 0)? != int(a, 1)?)),
        ],
    },
    Family {
        name: "pick",
        held_out: false,
        params: &[INTS, INTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.int(1, 12), d.int(1, 12)],
        choices: &[
            c("return the larger of {0} and {1}", "max({0}, {1})", |a| {
                i(int(a, 0)?.max(int(a, 1)?))
            }),
            c("return the smaller of {0} and {1}", "min({0}, {1})", |a| {
                i(int(a, 0)?.min(int(a, 1)?))
            }),
            c("return the distance of {0} and {1}", "abs({0} - {1})", |a| {
                i((int(a, 0)? - int(a, 1)?).abs())
            }),
            c("return the mean of {0} and {1}", "({0} + {1}) // 2", |a| {
                i((int(a, 0)? + int(a, 1)?).div_euclid(2))
            }),
        ],
    },
    Family {
        name: "number_test",
        held_out: false,
        params: &[INTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.int(-6, 9)],
        choices: &[
            c("tell whether {0} is even", "{0} % 2 == 0", |a| b(int(a, 0)?.rem_euclid(2) == 0)),
            c("tell whether {0} is odd", "{0} % 2 == 1", |a| b(int(a, 0)?.rem_euclid(2) == 1)),
            c("tell whether {0} is positive", "{0} > 0", |a| b(int(a, 0)? > 0)),
            c("tell whether {0} is negative", "{0} < 0", |a| b(int(a, 0)? < 0)),
            c("tell whether {0} is zero", "{0} == 0", |a| b(int(a, 0)? == 0)),
            c("", "{0} % 3 == 0", |a| b(int(a, 0)?.rem_euclid(3) == 0)),
        ],
    },
    Family {
        name: "fold",
        held_out: false,
        params: &[NUMS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.numbers(1, 9)],
        choices: &[
            c("return the sum of {0}", "sum({0})", |a| i(nums(a, 0)?.iter().sum())),
            c("return the largest of {0}", "max({0})", |a| i(*nums(a, 0)?.iter().max()?)),
            c("return the smallest of {0}", "min({0})", |a| i(*nums(a, 0)?.iter().min()?)),
            c("return the count of {0}", "len({0})", |a| i(i64::try_from(list(a, 0)?.len()).ok()?)),
            c("return the spread of {0}", "max({0}) - min({0})", |a| {
                i(nums(a, 0)?.iter().max()? - nums(a, 0)?.iter().min()?)
            }),
        ],
    },
    Family {
        name: "filter",
        held_out: false,
        params: &[NUMS, INTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| draw_numbers_and_limit(d),
        choices: &[
            c("keep {0} above {1}", "[v for v in {0} if v > {1}]", |a| {
                ints(nums(a, 0)?.into_iter().filter(|v| int(a, 1).is_some_and(|n| *v > n)))
            }),
            c("keep {0} below {1}", "[v for v in {0} if v < {1}]", |a| {
                ints(nums(a, 0)?.into_iter().filter(|v| int(a, 1).is_some_and(|n| *v < n)))
            }),
            c("keep {0} at least {1}", "[v for v in {0} if v >= {1}]", |a| {
                ints(nums(a, 0)?.into_iter().filter(|v| int(a, 1).is_some_and(|n| *v >= n)))
            }),
            c("keep {0} at most {1}", "[v for v in {0} if v <= {1}]", |a| {
                ints(nums(a, 0)?.into_iter().filter(|v| int(a, 1).is_some_and(|n| *v <= n)))
            }),
            c("keep {0} equal to {1}", "[v for v in {0} if v == {1}]", |a| {
                ints(nums(a, 0)?.into_iter().filter(|v| int(a, 1).is_some_and(|n| *v == n)))
            }),
            c("keep {0} other than {1}", "[v for v in {0} if v != {1}]", |a| {
                ints(nums(a, 0)?.into_iter().filter(|v| int(a, 1).is_some_and(|n| *v != n)))
            }),
        ],
    },
    Family {
        name: "index",
        held_out: false,
        params: &[LISTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.words(3, 4)],
        choices: &[
            c("return the first of {0}", "{0}[0]", |a| list(a, 0)?.first().cloned()),
            c("return the second of {0}", "{0}[1]", |a| list(a, 0)?.get(1).cloned()),
            c("return the last of {0}", "{0}[-1]", |a| list(a, 0)?.last().cloned()),
            c("return the second last of {0}", "{0}[-2]", |a| {
                list(a, 0)?.iter().rev().nth(1).cloned()
            }),
            c("", "{0}[2]", |a| list(a, 0)?.get(2).cloned()),
        ],
    },
    Family {
        name: "slice",
        held_out: false,
        params: &[TEXTS, INTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.text(), d.int(1, 3)],
        choices: &[
            c("keep the first {1} of {0}", "{0}[:{1}]", |a| cut(text(a, 0)?, 0, count(a, 1)?)),
            c("keep the last {1} of {0}", "{0}[-{1}:]", |a| {
                cut(text(a, 0)?, text(a, 0)?.len().checked_sub(count(a, 1)?)?, 99)
            }),
            c("drop the first {1} of {0}", "{0}[{1}:]", |a| cut(text(a, 0)?, count(a, 1)?, 99)),
            c("drop the last {1} of {0}", "{0}[:-{1}]", |a| {
                cut(text(a, 0)?, 0, text(a, 0)?.len().checked_sub(count(a, 1)?)?)
            }),
        ],
    },
    Family {
        name: "sort",
        held_out: false,
        params: &[NUMS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.numbers(1, 7)],
        choices: &[
            c("sort {0} upwards", "sorted({0})", |a| ints(sorted(a)?)),
            c("sort {0} downwards", "sorted({0}, reverse=True)", |a| {
                ints(sorted(a)?.into_iter().rev())
            }),
            c("sort {0} without repeats", "sorted(set({0}))", |a| ints(unique(a)?)),
            c("reverse {0}", "{0}[::-1]", |a| ints(nums(a, 0)?.into_iter().rev())),
            c("", "list({0})", |a| ints(nums(a, 0)?)),
        ],
    },
    Family {
        name: "each",
        held_out: false,
        params: &[NUMS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.numbers(1, 9)],
        choices: &[
            c("double each of {0}", "[v * 2 for v in {0}]", |a| {
                ints(nums(a, 0)?.into_iter().map(|v| v * 2))
            }),
            c("square each of {0}", "[v * v for v in {0}]", |a| {
                ints(nums(a, 0)?.into_iter().map(|v| v * v))
            }),
            c("negate each of {0}", "[-v for v in {0}]", |a| {
                ints(nums(a, 0)?.into_iter().map(|v| -v))
            }),
            c("halve each of {0}", "[v // 2 for v in {0}]", |a| {
                ints(nums(a, 0)?.into_iter().map(|v| v.div_euclid(2)))
            }),
            c("add one to each of {0}", "[v + 1 for v in {0}]", |a| {
                ints(nums(a, 0)?.into_iter().map(|v| v + 1))
            }),
        ],
    },
    Family {
        name: "loop",
        held_out: false,
        params: &[NUMS],
        before: &["out = 0", "for v in {0}:"],
        line: "    out += {c}",
        after: &["return out"],
        args: |d| vec![d.numbers(1, 9)],
        choices: &[
            c("add up {0}", "v", |a| i(nums(a, 0)?.iter().sum())),
            c("add up the squares of {0}", "v * v", |a| i(nums(a, 0)?.iter().map(|v| v * v).sum())),
            c("add up the doubles of {0}", "v * 2", |a| i(nums(a, 0)?.iter().map(|v| v * 2).sum())),
            c("add up the halves of {0}", "v // 2", |a| {
                i(nums(a, 0)?.iter().map(|v| v.div_euclid(2)).sum())
            }),
            c("count {0}", "1", |a| i(i64::try_from(list(a, 0)?.len()).ok()?)),
        ],
    },
    Family {
        name: "guard",
        held_out: false,
        params: &[INTS, INTS],
        before: &[],
        line: "if {c}:",
        after: &["    return {1}", "return {0}"],
        args: |d| vec![d.int(-4, 9), d.int(1, 5)],
        choices: &[
            c("return {1} when {0} is below {1}", "{0} < {1}", |a| guard(a, |x, n| x < n)),
            c("return {1} when {0} is above {1}", "{0} > {1}", |a| guard(a, |x, n| x > n)),
            c("return {1} when {0} is zero", "{0} == 0", |a| guard(a, |x, _| x == 0)),
            c("return {1} when {0} is negative", "{0} < 0", |a| guard(a, |x, _| x < 0)),
            c("return {1} when {0} is odd", "{0} % 2 == 1", |a| {
                guard(a, |x, _| x.rem_euclid(2) == 1)
            }),
            c("return {1} when {0} is even", "{0} % 2 == 0", |a| {
                guard(a, |x, _| x.rem_euclid(2) == 0)
            }),
        ],
    },
    Family {
        name: "case",
        held_out: false,
        params: &[TEXTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![draw_mixed_case(d)],
        choices: &[
            c("put {0} in upper case", "{0}.upper()", |a| s(text(a, 0)?.to_ascii_uppercase())),
            c("put {0} in lower case", "{0}.lower()", |a| s(text(a, 0)?.to_ascii_lowercase())),
            c("put {0} in title case", "{0}.title()", |a| s(title(text(a, 0)?))),
            c("swap the case of {0}", "{0}.swapcase()", |a| s(swap_case(text(a, 0)?))),
        ],
    },
    Family {
        name: "split",
        held_out: false,
        params: &[TEXTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![draw_punctuated(d)],
        choices: &[
            c("split {0} at commas", "{0}.split(',')", |a| texts(text(a, 0)?.split(','))),
            c("split {0} at dashes", "{0}.split('-')", |a| texts(text(a, 0)?.split('-'))),
            c("split {0} at colons", "{0}.split(':')", |a| texts(text(a, 0)?.split(':'))),
            c("split {0} at dots", "{0}.split('.')", |a| texts(text(a, 0)?.split('.'))),
        ],
    },
    Family {
        name: "join",
        held_out: false,
        params: &[LISTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.words(2, 3)],
        choices: &[
            c("join {0} with commas", "','.join({0})", |a| s(joined(a, ",")?)),
            c("join {0} with dashes", "'-'.join({0})", |a| s(joined(a, "-")?)),
            c("join {0} with colons", "':'.join({0})", |a| s(joined(a, ":")?)),
            c("join {0} with dots", "'.'.join({0})", |a| s(joined(a, ".")?)),
        ],
    },
    Family {
        name: "table",
        held_out: false,
        params: &[TABLES],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![draw_prices(d)],
        choices: &[
            c("list the keys of {0}", "list({0})", |a| {
                texts(table(a, 0)?.iter().map(|(key, _)| key.as_str()))
            }),
            c("list the values of {0}", "list({0}.values())", |a| {
                ints(table(a, 0)?.iter().map(|(_, value)| *value))
            }),
            c("count the keys of {0}", "len({0})", |a| i(i64::try_from(table(a, 0)?.len()).ok()?)),
            c("add up the values of {0}", "sum({0}.values())", |a| {
                i(table(a, 0)?.iter().map(|(_, value)| *value).sum())
            }),
            c("return the largest value of {0}", "max({0}.values())", |a| {
                i(table(a, 0)?.iter().map(|(_, value)| *value).max()?)
            }),
        ],
    },
    Family {
        name: "date",
        held_out: false,
        params: &[DATES],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![draw_date(d)],
        choices: &[
            c("return the year of {0}", "{0}[:4]", |a| cut(text(a, 0)?, 0, 4)),
            c("return the month of {0}", "{0}[5:7]", |a| cut(text(a, 0)?, 5, 7)),
            c("return the day of {0}", "{0}[8:]", |a| cut(text(a, 0)?, 8, 10)),
            c("return the year and month of {0}", "{0}[:7]", |a| cut(text(a, 0)?, 0, 7)),
            c("return the month and day of {0}", "{0}[5:]", |a| cut(text(a, 0)?, 5, 10)),
            c("", "{0}[:5]", |a| cut(text(a, 0)?, 0, 5)),
        ],
    },
    Family {
        name: "parse",
        held_out: false,
        params: &[TEXTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![draw_binary_digits(d)],
        choices: &[
            c("read {0} as decimal", "int({0})", |a| radix(a, 10)),
            c("read {0} as binary", "int({0}, 2)", |a| radix(a, 2)),
            c("read {0} as octal", "int({0}, 8)", |a| radix(a, 8)),
            c("read {0} as hex", "int({0}, 16)", |a| radix(a, 16)),
        ],
    },
    Family {
        name: "range",
        held_out: true,
        params: &[INTS, INTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.int(0, 4), d.int(6, 9)],
        choices: &[
            c("list {0} up to {1}", "list(range({0}, {1} + 1))", |a| ints(int(a, 0)?..=int(a, 1)?)),
            c("list {0} up to before {1}", "list(range({0}, {1}))", |a| {
                ints(int(a, 0)?..int(a, 1)?)
            }),
            c("list after {0} up to {1}", "list(range({0} + 1, {1} + 1))", |a| {
                ints(int(a, 0)? + 1..=int(a, 1)?)
            }),
            c("list after {0} up to before {1}", "list(range({0} + 1, {1}))", |a| {
                ints(int(a, 0)? + 1..int(a, 1)?)
            }),
        ],
    },
    Family {
        name: "pad",
        held_out: true,
        params: &[TEXTS, INTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.text(), d.int(5, 8)],
        choices: &[
            c("pad {0} on the left to {1}", "{0}.rjust({1})", |a| {
                s(format!("{:>1$}", text(a, 0)?, count(a, 1)?))
            }),
            c("pad {0} on the right to {1}", "{0}.ljust({1})", |a| {
                s(format!("{:<1$}", text(a, 0)?, count(a, 1)?))
            }),
            c("fill {0} with zeros to {1}", "{0}.zfill({1})", |a| {
                s(format!("{:0>1$}", text(a, 0)?, count(a, 1)?))
            }),
            c("center {0} in {1}", "{0}.center({1})", |a| s(center(text(a, 0)?, count(a, 1)?))),
        ],
    },
    Family {
        name: "affix",
        held_out: true,
        params: &[TEXTS, &["end", "part"]],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| draw_word_and_affix(d),
        choices: &[
            c("tell whether {0} starts with {1}", "{0}.startswith({1})", |a| {
                b(text(a, 0)?.starts_with(text(a, 1)?))
            }),
            c("tell whether {0} ends with {1}", "{0}.endswith({1})", |a| {
                b(text(a, 0)?.ends_with(text(a, 1)?))
            }),
            c("tell whether {0} contains {1}", "{1} in {0}", |a| {
                b(text(a, 0)?.contains(text(a, 1)?))
            }),
            c("tell whether {0} equals {1}", "{0} == {1}", |a| b(text(a, 0)? == text(a, 1)?)),
        ],
    },
    Family {
        name: "letters",
        held_out: true,
        params: &[TEXTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![draw_letters_or_digits(d)],
        choices: &[
            c("tell whether {0} is all digits", "{0}.isdigit()", |a| {
                b(text(a, 0)?.bytes().all(|c| c.is_ascii_digit()))
            }),
            c("tell whether {0} is all letters", "{0}.isalpha()", |a| {
                b(text(a, 0)?.bytes().all(|c| c.is_ascii_alphabetic()))
            }),
            c("tell whether {0} is upper case", "{0}.isupper()", |a| {
                b(one_case(text(a, 0)?, u8::is_ascii_lowercase))
            }),
            c("tell whether {0} is lower case", "{0}.islower()", |a| {
                b(one_case(text(a, 0)?, u8::is_ascii_uppercase))
            }),
        ],
    },
    Family {
        name: "units",
        held_out: true,
        params: &[INTS],
        before: &[],
        line: "return {c}",
        after: &[],
        args: |d| vec![d.int(14, 60)],
        choices: &[
            c("turn {0} hours into minutes", "{0} * 60", |a| i(int(a, 0)? * 60)),
            c("turn {0} days into hours", "{0} * 24", |a| i(int(a, 0)? * 24)),
            c("turn {0} weeks into days", "{0} * 7", |a| i(int(a, 0)? * 7)),
            c("turn {0} hours into days", "{0} // 24", |a| i(int(a, 0)?.div_euclid(24))),
            c("turn {0} days into weeks", "{0} // 7", |a| i(int(a, 0)?.div_euclid(7))),
        ],
    },
];
