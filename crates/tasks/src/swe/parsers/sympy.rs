//! Parses the log of sympy's test runner.

use super::{MissingName, ReadLines};
use crate::swe::status::{Status, StatusMap};
use crate::text::{strip, tokens};

/// Finds results at the end of a test's line, and failed tests in the headings of tracebacks like
/// `____ sympy/a/test_b.py:test_c ____`. A result takes precedence over a heading, whichever comes
/// first.
#[derive(Debug, Default)]
pub(super) struct Sympy;

impl ReadLines for Sympy {
    fn line(&mut self, line: &str, map: &mut StatusMap) -> Result<(), MissingName> {
        if let Some(name) = heading(line)
            && map.get(name).is_none()
        {
            map.insert(name, Status::Failed);
        }
        let line = strip(line);
        if !line.starts_with("test_") {
            return Ok(());
        }
        let ends = [(" E", Status::Error), (" F", Status::Failed), (" ok", Status::Passed)];
        let status = ends.into_iter().find(|(end, _)| line.ends_with(end));
        if let (Some((_, status)), Some(name)) = (status, tokens(line).next()) {
            map.insert(name, status);
        }
        Ok(())
    }

    fn finish(&mut self, _: &mut StatusMap) {}
}

/// The text between the first and the last space of a line, if it looks like `file.py:name`. This
/// is equivalent to the harness's pattern, whose runs of underscores may be empty.
fn heading(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once(' ')?;
    let (name, _) = rest.rsplit_once(' ')?;
    name.contains(".py:").then_some(name)
}
