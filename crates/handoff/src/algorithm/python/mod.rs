//! Generates `settings.py` and `rules.py` of the PyTorch trainer.

use super::declaration::AlgorithmValues;
use super::{Field, Hyperparameters, Presence, options};
use crate::condition::{Condition, FieldValue, Number, Rule};
use crate::rules::all_rules;
use orchestrate_settings::Range;
use std::fmt::Write;
use std::path::Path;

const WIDTH: usize = 100;
const HEADER: &str = "Generated from crates/handoff/src/algorithm/declaration.rs. Do not edit: \
                      change the declaration, and\nrun `ORCHESTRATE_REGENERATE=1 cargo nextest run \
                      -p orchestrate-handoff generated`.";

#[test]
fn generated_python_is_current() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../trainer/orchestrate_trainer");
    let files = [("settings.py", settings()), ("rules.py", rules())];
    for (name, text) in files {
        let path = Path::new(folder).join(name);
        if std::env::var_os("ORCHESTRATE_REGENERATE").is_some() {
            fs_err::write(&path, &text).unwrap();
        }
        let stored = fs_err::read_to_string(&path).unwrap();
        assert!(
            stored == text,
            "{name} is out of date: run ORCHESTRATE_REGENERATE=1 cargo nextest run -p \
             orchestrate-handoff generated"
        );
        let longest = text.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(WIDTH), "{name} has a line of {longest:?} characters");
    }
}

fn settings() -> String {
    let fields = Hyperparameters::fields();
    include_str!("settings.template")
        .replace("{header}", HEADER)
        .replace("{choices}", &choices(&fields))
        .replace("{fields}", &dataclass_fields(&fields))
}

fn choices(fields: &[Field]) -> String {
    let quoted =
        |field: &Field| -> Vec<String> { field.options.iter().map(|name| string(name)).collect() };
    let mut text = "#: Policy losses that this trainer supports.\n".to_owned();
    let mut entries = Vec::new();
    for field in fields.iter().filter(|field| !field.options.is_empty()) {
        if field.name == "policy_loss" {
            let _ = write!(text, "ALGORITHMS = ({})", quoted(field).join(", "));
            entries.push("    \"policy_loss\": ALGORITHMS,".to_owned());
        } else {
            entries.push(call(&format!("    {}: ", string(field.name)), &quoted(field), ","));
        }
    }
    format!("{text}\nCHOICES: dict[str, tuple[str, ...]] = {{\n{}\n}}", entries.join("\n"))
}

fn dataclass_fields(fields: &[Field]) -> String {
    let defaults = AlgorithmValues::default().sent();
    let (required, others): (Vec<&Field>, Vec<&Field>) =
        fields.iter().partition(|field| field.presence == Presence::Required);
    let mut lines = Vec::new();
    for field in required.into_iter().chain(others) {
        lines.extend(comment(field.description));
        lines.push(match field.presence {
            Presence::Required => format!("    {}: {}", field.name, field.python),
            Presence::Nullable => format!("    {}: {} = None", field.name, field.python),
            Presence::Optional => {
                let default = value(defaults.value(field.name));
                format!("    {}: {} = {default}", field.name, field.python)
            }
        });
    }
    lines.join("\n")
}

/// A description as a comment that documentation tools read.
fn comment(description: &[&str]) -> Vec<String> {
    let mut lines = vec!["    #:".to_owned()];
    for word in description.iter().flat_map(|line| line.split_whitespace()) {
        let last = lines.last_mut().unwrap();
        if last.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(format!("    #: {word}"));
        } else {
            let _ = write!(last, " {word}");
        }
    }
    lines
}

fn rules() -> String {
    let mut functions = Vec::new();
    let mut names = Vec::new();
    for field in Hyperparameters::fields() {
        let own: Vec<&Rule> = all_rules().iter().filter(|rule| rule.field == field.name).collect();
        if own.is_empty() {
            continue;
        }
        let mut text = format!("def _{}(h: Hyperparameters) -> Iterator[Refusal]:", field.name);
        for rule in own {
            let _ = write!(text, "\n{}", rule_statement(rule, &field));
        }
        functions.push(text);
        names.push(format!("_{}", field.name));
    }
    let names: Vec<String> = names.iter().map(|name| format!("    {name},")).collect();
    let table = format!("RULES = (\n{}\n)", names.join("\n"));
    let text = format!("{}\n\n\n{table}", functions.join("\n\n\n"));
    include_str!("rules.template").replace("{header}", HEADER).replace("{rules}", &text)
}

fn rule_statement(rule: &Rule, field: &Field) -> String {
    let mut parts = operands(&rule.refused);
    // A value that is turned off cannot be compared.
    let nullable = field.presence == Presence::Nullable;
    let is_on = format!("h.{} is not None", rule.field);
    if nullable && !parts.contains(&is_on) {
        parts.insert(parts.len() - 1, is_on);
    }
    // Alternatives come last, where they can be wrapped on their own lines.
    parts.sort_by_key(|part| part.starts_with('('));
    let one_line = format!("    if {}:", parts.join(" and "));
    let mut text = match parts.as_slice() {
        _ if one_line.chars().count() <= WIDTH => one_line,
        [first, any] if any.starts_with('(') => {
            let inner = any.trim_start_matches('(').trim_end_matches(')');
            format!("    if {first} and (\n        {inner}\n    ):")
        }
        parts => format!("    if (\n        {}\n    ):", parts.join("\n        and ")),
    };
    let _ = write!(text, "\n{}", refusal(rule));
    text
}

/// The statement that reports the refusal.
fn refusal(rule: &Rule) -> String {
    let start = format!("        yield \"{0}\", h.{0}, ", rule.field);
    let remedy = string(&rule.remedy);
    if start.chars().count() + remedy.chars().count() <= WIDTH {
        return format!("{start}{remedy}");
    }
    let indent = " ".repeat(12);
    let mut lines = vec![String::new()];
    for word in rule.remedy.split_inclusive(' ') {
        let last = lines.last_mut().unwrap();
        // The literal, with its quotes and escapes, must fit on a line.
        if string(&format!("{last}{word}")).chars().count() > WIDTH - indent.len() {
            lines.push(word.to_owned());
        } else {
            last.push_str(word);
        }
    }
    if lines.len() == 1 {
        return format!(
            "        yield (\n{indent}\"{0}\",\n{indent}h.{0},\n{indent}{remedy},\n        )",
            rule.field
        );
    }
    let lines: Vec<String> = lines.iter().map(|line| format!("{indent}{}", string(line))).collect();
    format!("        remedy = (\n{}\n        )\n{start}remedy", lines.join("\n"))
}

/// The operands of a conjunction.
fn operands(condition: &Condition) -> Vec<String> {
    match condition {
        Condition::All(conditions) => conditions.iter().flat_map(operands).collect(),
        Condition::Is(..)
        | Condition::IsOn(_)
        | Condition::Within(..)
        | Condition::Above(..)
        | Condition::Not(_)
        | Condition::Any(_) => vec![expression(condition)],
    }
}

fn expression(condition: &Condition) -> String {
    match condition {
        Condition::Is(field, names) => comparison(field, names, true),
        Condition::IsOn(field) => is_on(field).0,
        Condition::Within(field, range) => inside(field, range),
        Condition::Above(Number::Constant(limit), two) => {
            format!("{} < {}", number(two), plain(*limit))
        }
        Condition::Above(one, two) => format!("{} > {}", number(one), number(two)),
        Condition::All(conditions) => {
            conditions.iter().map(expression).collect::<Vec<_>>().join(" and ")
        }
        Condition::Any(conditions) => {
            format!("({})", conditions.iter().map(expression).collect::<Vec<_>>().join(" or "))
        }
        Condition::Not(condition) => match condition.as_ref() {
            Condition::Is(field, names) => comparison(field, names, false),
            Condition::IsOn(field) => is_on(field).1,
            Condition::Within(field, range) if kind(field) == "int" && range.high().is_none() => {
                let low = range.low().map_or(0.0, |(low, _)| low);
                format!("h.{field} < {}", plain(low))
            }
            other => format!("not {}", expression(other)),
        },
    }
}

/// A test that the option is one of `names` or, if not `is_one`, that it is none of them. Uses the
/// complement of `names` if that is shorter.
fn comparison(field: &str, names: &[&str], is_one: bool) -> String {
    let others: Vec<&str> =
        options(field).into_iter().filter(|option| !names.contains(option)).collect();
    let (names, is_one) =
        if others.len() < names.len() { (others.as_slice(), !is_one) } else { (names, is_one) };
    let (one, many) = if is_one { ("==", "in") } else { ("!=", "not in") };
    match names {
        [name] => format!("h.{field} {one} {}", string(name)),
        names => {
            let names: Vec<String> = names.iter().map(|name| string(name)).collect();
            format!("h.{field} {many} ({})", names.join(", "))
        }
    }
}

/// The type of a field in Python.
fn kind(field: &str) -> &'static str {
    let fields = Hyperparameters::fields();
    fields.iter().find(|known| known.name == field).map_or("", |known| known.python)
}

/// Two tests: that a value is on, and that it is off.
fn is_on(field: &str) -> (String, String) {
    match kind(field) {
        "bool" => (format!("h.{field}"), format!("not h.{field}")),
        _ => (format!("h.{field} is not None"), format!("h.{field} is None")),
    }
}

fn inside(field: &str, range: &Range<f64>) -> String {
    let kind = kind(field);
    let ends = |value: &str| {
        let low = range.low().map(|(low, closed)| (plain(low), if closed { "<=" } else { "<" }));
        let high =
            range.high().map(|(high, closed)| (plain(high), if closed { "<=" } else { "<" }));
        // No range contains NaN or infinity.
        let unbounded = Some(("math.inf".to_owned(), "<")).filter(|_| kind != "int");
        match (low, high.or(unbounded)) {
            (Some((low, below)), Some((high, above))) => {
                format!("{low} {below} {value} {above} {high}")
            }
            (Some((low, below)), None) => format!("{low} {below} {value}"),
            (None, Some((high, above))) => format!("{value} {above} {high}"),
            (None, None) => "True".to_owned(),
        }
    };
    if kind.starts_with("tuple") {
        format!("all({} for part in h.{field})", ends("part"))
    } else {
        ends(&format!("h.{field}"))
    }
}

fn number(of: &Number) -> String {
    match of {
        Number::Field(field) => format!("h.{field}"),
        Number::Constant(value) => plain(*value),
        Number::Sum(one, two) => format!("{} + {}", number(one), number(two)),
        Number::Difference(one, two) => format!("{} - {}", number(one), number(two)),
        Number::Negative(of) => format!("-{}", number(of)),
        Number::Logarithm(of) => format!("math.log({})", number(of)),
    }
}

/// A number, without a decimal point if it is whole.
fn plain(value: f64) -> String {
    let text = format!("{value:?}");
    text.strip_suffix(".0").map_or_else(|| text.clone(), str::to_owned)
}

fn value(of: FieldValue) -> String {
    match of {
        FieldValue::Choice(name) => string(name),
        FieldValue::Number(value) => format!("{value:?}"),
        FieldValue::Whole(value) => value.to_string(),
        FieldValue::Pair(one, two) => format!("({one:?}, {two:?})"),
        FieldValue::Flag(true) => "True".to_owned(),
        FieldValue::Flag(false) => "False".to_owned(),
        FieldValue::Off => "None".to_owned(),
    }
}

/// A string literal in the quotes that need fewer escapes.
fn string(text: &str) -> String {
    let count = |quote: char| text.matches(quote).count();
    let quote = if count('"') > count('\'') { '\'' } else { '"' };
    let mut literal = String::from(quote);
    for c in text.chars() {
        if c == quote || c == '\\' {
            literal.push('\\');
        }
        literal.push(c);
    }
    literal.push(quote);
    literal
}

/// A tuple of `items` between `start` and `end`, on several lines if it is too long for one.
fn call(start: &str, items: &[String], end: &str) -> String {
    let one_line = format!("{start}({}){end}", items.join(", "));
    if one_line.chars().count() <= WIDTH {
        return one_line;
    }
    let items: Vec<String> = items.iter().map(|item| format!("        {item},")).collect();
    format!("{start}(\n{}\n    ){end}", items.join("\n"))
}
