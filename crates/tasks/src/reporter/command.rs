//! Reads the commands that run hidden tests.

use std::collections::BTreeMap;

/// How pytest is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// With `-m pytest`.
    Pytest,
    /// By this script, which is ours.
    Script(String),
}

/// A command that runs pytest, in parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestCommand {
    /// Environment variables that it sets.
    pub env: BTreeMap<String, String>,
    /// A program that starts Python, with its arguments; mostly empty.
    pub wrapper: Vec<String>,
    /// The Python program.
    pub python: String,
    /// Options of Python.
    pub flags: Vec<String>,
    /// How pytest is started.
    pub start: Start,
    /// Arguments of pytest.
    pub arguments: Vec<String>,
}

/// The runner of repair tasks.
const SCRIPT: &str = "r2e_tests/runner.py";

impl TestCommand {
    /// Reads a shell script that consists of one command which runs pytest. `None` for any other.
    pub fn parse(script: &str) -> Option<Self> {
        let is_command =
            |line: &&str| !line.is_empty() && !line.starts_with('#') && !line.starts_with("set -");
        let mut lines = script.lines().map(str::trim).filter(is_command);
        let (line, None) = (lines.next()?, lines.next()) else { return None };
        let mut words = split_words(line)?.into_iter().peekable();
        let mut env = BTreeMap::new();
        while let Some((name, value)) = words.peek().and_then(|word| assignment(word)) {
            env.insert(name, value);
            words.next();
        }
        words.next_if(|word| word == "exec");
        let mut wrapper = Vec::new();
        if words.peek().is_some_and(|word| word == "xvfb-run") {
            wrapper.extend(words.next());
            while let Some(option) = words.next_if(|word| word.starts_with('-')) {
                wrapper.push(option);
            }
        }
        let python = words.next().filter(|word| is_python(word))?;
        let mut flags = Vec::new();
        let start = loop {
            let word = words.next()?;
            match word.as_str() {
                "-m" => break (words.next()? == "pytest").then_some(Start::Pytest)?,
                "-W" | "-X" => flags.extend([word, words.next()?]),
                "-s" | "-B" | "-u" | "-bb" => flags.push(word),
                SCRIPT => break Start::Script(word),
                _ => return None,
            }
        };
        Some(Self { env, wrapper, python, flags, start, arguments: words.collect() })
    }
}

fn is_python(word: &str) -> bool {
    let name = word.rsplit('/').next().unwrap_or(word);
    name.strip_prefix("python")
        .is_some_and(|rest| rest.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

fn assignment(word: &str) -> Option<(String, String)> {
    let (name, value) = word.split_once('=')?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let starts = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    (starts && name.chars().all(is_name)).then(|| (name.to_owned(), value.to_owned()))
}

/// The words of a shell command without expansions; `None` if it needs a shell.
fn split_words(line: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            ' ' | '\t' => words.extend(word.take()),
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next()? {
                        end if end == c => break,
                        '$' | '`' | '\\' if c == '"' => return None,
                        inside => word.push(inside),
                    }
                }
            }
            '\\' => word.get_or_insert_default().push(chars.next()?),
            '|' | '&' | ';' | '<' | '>' | '(' | ')' | '$' | '`' | '*' | '?' | '[' | '{' | '~'
            | '#' | '!' => return None,
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_images_and_of_repair_tasks_are_read() {
        let command = TestCommand::parse(
            "#!/bin/sh\nset -e\n\nPYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' \
             .venv/bin/python -W ignore -m pytest -rA r2e_tests\n",
        )
        .unwrap();
        assert_eq!(command.python, ".venv/bin/python");
        assert_eq!(command.flags, ["-W", "ignore"]);
        assert_eq!(command.start, Start::Pytest);
        assert_eq!(command.arguments, ["-rA", "r2e_tests"]);
        let warnings = "ignore::UserWarning,ignore::SyntaxWarning";
        assert_eq!(command.env["PYTHONWARNINGS"], warnings);

        let orange = "QT_QPA_PLATFORM=minimal PYTHONWARNINGS='a' xvfb-run --auto-servernum \
            .venv/bin/python -W ignore -m pytest -rA r2e_tests";
        let command = TestCommand::parse(orange).unwrap();
        assert_eq!(command.wrapper, ["xvfb-run", "--auto-servernum"]);
        assert_eq!(command.env.len(), 2);

        let repair = r"PYTHONHASHSEED=0 exec python3 -s -B r2e_tests/runner.py -rpfE --tb=no -q -c /dev/null --rootdir=. -o addopts= --deselect 't.py::a'\''b[x y]' tests";
        let command = TestCommand::parse(repair).unwrap();
        assert_eq!(command.start, Start::Script("r2e_tests/runner.py".to_owned()));
        assert_eq!(
            command.arguments[6..],
            ["-o", "addopts=", "--deselect", "t.py::a'b[x y]", "tests"]
        );
    }

    #[test]
    fn other_commands_are_not_read() {
        for script in [
            "",
            "run-tests",
            ".venv/bin/python -W ignore r2e_tests/unittest_custom_runner.py",
            "exec python3 -I -S -B r2e_tests/runner.py",
            "cd x && python -m pytest",
            "python -m pytest\npython -m pytest",
            "python -m pytest $ARGS",
            "python -m pytest \"$ARGS\"",
            "python -m unittest",
            "pythonic -m pytest",
            "python -m pytest 'open",
        ] {
            assert_eq!(TestCommand::parse(script), None, "{script}");
        }
    }
}
