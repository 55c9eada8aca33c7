//! Whether a server is fit for training with routing replay: findings, each with its remedy.

use std::fmt;

/// What a finding means for a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Training with it would be wrong or impossible.
    Refusal,
    /// A run goes on, but a person should know.
    Warning,
}

/// One thing about a server that is not as a run wants it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Short fixed name, like `pipeline-parallel`.
    pub name: &'static str,
    /// What it means for a run.
    pub severity: Severity,
    /// What was found.
    pub words: String,
    /// What to do about it.
    pub remedy: String,
}

impl Finding {
    /// A reason not to train with this server.
    pub(crate) fn refusal(
        name: &'static str,
        words: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { name, severity: Severity::Refusal, words: words.into(), remedy: remedy.into() }
    }

    /// Something a person should know.
    pub(crate) fn warning(
        name: &'static str,
        words: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { severity: Severity::Warning, ..Self::refusal(name, words, remedy) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.name, self.words, self.remedy)
    }
}

/// A released version's three numbers.
pub(crate) type Release = (u32, u32, u32);

/// Reads `0.5.12.post1`, `0.31.0rc2`, `v0.33`; `None` where two numbers do not begin it.
pub(crate) fn release(version: &str) -> Option<Release> {
    let mut parts = version.trim_start_matches('v').split('.').map(|part| {
        let digits = part.bytes().take_while(u8::is_ascii_digit).count();
        part.get(..digits)?.parse::<u32>().ok()
    });
    let (major, minor) = (parts.next()??, parts.next()??);
    Some((major, minor, parts.next().flatten().unwrap_or(0)))
}

/// What there is to say about a server's version.
pub(crate) fn check_version(
    engine: &str,
    version: Option<&str>,
    oldest: Release,
    why: &str,
) -> Option<Finding> {
    let (major, minor, patch) = oldest;
    let needed = format!("{engine} {major}.{minor}.{patch}");
    match version.map(|version| (version, release(version))) {
        Some((_, Some(found))) if found >= oldest => None,
        Some((version, Some(_))) => Some(Finding::refusal(
            "version",
            format!("it is {engine} {version}, and before {needed} {why}"),
            format!("upgrade it to {needed} or later"),
        )),
        Some((version, None)) => Some(Finding::warning(
            "version",
            format!("its version `{version}` is no release"),
            format!("make sure that it has what {needed} has"),
        )),
        None => Some(Finding::warning(
            "version",
            "it does not say its version",
            format!("make sure that it is {needed} or later"),
        )),
    }
}

/// What there is to say about the longest sequence a server takes.
pub(crate) fn check_context(context: Option<usize>, model: usize) -> Option<Finding> {
    let context = context.filter(|&context| context < model)?;
    Some(Finding::warning(
        "context",
        format!("it takes sequences of {context} tokens, the model could have {model}"),
        "serve with a longer context, or keep rollout.max_sequence_tokens below it",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        assert_eq!(release("0.5.12.post1"), Some((0, 5, 12)));
        assert_eq!(release("0.31.0rc2"), Some((0, 31, 0)));
        assert_eq!(release("v0.33"), Some((0, 33, 0)));
        assert_eq!(release("0.33.1.dev5+gabc"), Some((0, 33, 1)));
        for strange in ["", "main", "0", "x.1", "99999999999.1"] {
            assert_eq!(release(strange), None, "{strange}");
        }
        let check = |version| check_version("E", version, (0, 5, 12), "it was worse");
        assert_eq!(check(Some("0.5.12")), None);
        assert_eq!(check(Some("0.6.0")), None);
        let old = check(Some("0.5.9")).unwrap();
        assert_eq!((old.name, old.severity), ("version", Severity::Refusal));
        assert!(old.to_string().contains("upgrade it to E 0.5.12"), "{old}");
        assert_eq!(check(Some("nightly")).unwrap().severity, Severity::Warning);
        assert_eq!(check(None).unwrap().severity, Severity::Warning);
    }
}
