//! Whether a server can be trained with: findings of the capability probe, each with its remedy.

use crate::api::{Engine, EngineInfo};
use crate::error::EngineError;
use async_trait::async_trait;
use std::fmt;

/// What training requires of a server, for error messages.
pub(crate) const TRAINING_REQUIREMENTS: &str = "training needs the ids and log-probs of the sampled tokens and the routed experts: SGLang \
     0.5.12 or later (/generate, --enable-return-routed-experts), or vLLM 0.31 or later \
     (/inference/v1/generate, --enable-scale-out, --enable-return-routed-experts, \
     VLLM_SERVER_DEV_MODE=1)";

/// What a finding means for a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Training with this server would be wrong or impossible.
    Refusal,
    /// Training works, but the user should know.
    Warning,
}

/// One unsupported or doubtful property of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapabilityFinding {
    /// Short fixed name, such as `pipeline-parallel`.
    pub name: &'static str,
    /// What it means for a run.
    pub severity: Severity,
    /// What was found.
    pub problem: String,
    /// What to do about it.
    pub remedy: String,
}

impl CapabilityFinding {
    /// A reason not to train with this server.
    pub(crate) fn refusal(
        name: &'static str,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { name, severity: Severity::Refusal, problem: problem.into(), remedy: remedy.into() }
    }

    /// Something the user should know.
    pub(crate) fn warning(
        name: &'static str,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { severity: Severity::Warning, ..Self::refusal(name, problem, remedy) }
    }
}

impl fmt::Display for CapabilityFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.name, self.problem, self.remedy)
    }
}

/// Result of a capability probe.
#[derive(Debug, Clone)]
pub struct ProbeReport {
    /// Properties of the server, as it reports them.
    pub info: EngineInfo,
    /// Further facts for display, as `(name, value)`.
    pub facts: Vec<(&'static str, String)>,
    /// Unsupported or doubtful properties, refusals first.
    pub findings: Vec<CapabilityFinding>,
}

impl ProbeReport {
    /// The reasons not to train with this server.
    pub fn refusals(&self) -> impl Iterator<Item = &CapabilityFinding> {
        self.findings.iter().filter(|finding| finding.severity == Severity::Refusal)
    }

    /// Warnings for the user, without the refusals.
    pub fn warnings(&self) -> impl Iterator<Item = &CapabilityFinding> {
        self.findings.iter().filter(|finding| finding.severity == Severity::Warning)
    }
}

/// One server, which can be probed.
#[async_trait]
pub trait Worker: Engine {
    /// Asks the server what it is and samples a few tokens from it, to find out whether it can be
    /// trained with. Unsupported properties are part of the report, not an error.
    ///
    /// # Errors
    /// If the server cannot be asked at all.
    async fn probe(&self) -> Result<ProbeReport, EngineError>;
}

/// Major, minor and patch number of a released version.
pub(crate) type Release = (u32, u32, u32);

/// Parses versions such as `0.5.12.post1`, `0.31.0rc2` and `v0.33`; `None` unless the version starts
/// with two numbers.
pub(crate) fn parse_release(version: &str) -> Option<Release> {
    let mut parts = version.trim_start_matches('v').split('.').map(|part| {
        let digits = part.bytes().take_while(u8::is_ascii_digit).count();
        part.get(..digits)?.parse::<u32>().ok()
    });
    let (major, minor) = (parts.next()??, parts.next()??);
    Some((major, minor, parts.next().flatten().unwrap_or(0)))
}

/// A finding if a server's version is older than `oldest` or unknown. `defect` says what is wrong
/// with older versions.
pub(crate) fn check_version(
    engine: &str,
    version: Option<&str>,
    oldest: Release,
    defect: &str,
) -> Option<CapabilityFinding> {
    let (major, minor, patch) = oldest;
    let needed = format!("{engine} {major}.{minor}.{patch}");
    match version.map(|version| (version, parse_release(version))) {
        Some((_, Some(found))) if found >= oldest => None,
        Some((version, Some(_))) => Some(CapabilityFinding::refusal(
            "version",
            format!("the server is {engine} {version}; before {needed} {defect}"),
            format!("upgrade it to {needed} or later"),
        )),
        Some((version, None)) => Some(CapabilityFinding::warning(
            "version",
            format!("the server's version `{version}` is not a release"),
            format!("make sure that it is as new as {needed}"),
        )),
        None => Some(CapabilityFinding::warning(
            "version",
            "the server does not report its version",
            format!("make sure that it is {needed} or later"),
        )),
    }
}

/// A finding if a server's context is shorter than the model's, in tokens.
pub(crate) fn check_context(context: Option<usize>, model: usize) -> Option<CapabilityFinding> {
    let context = context.filter(|&context| context < model)?;
    Some(CapabilityFinding::warning(
        "context",
        format!("the server accepts sequences of {context} tokens; the model supports {model}"),
        "serve with a longer context, or keep rollout.max_sequence_tokens below it",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        assert_eq!(parse_release("0.5.12.post1"), Some((0, 5, 12)));
        assert_eq!(parse_release("0.31.0rc2"), Some((0, 31, 0)));
        assert_eq!(parse_release("v0.33"), Some((0, 33, 0)));
        assert_eq!(parse_release("0.33.1.dev5+gabc"), Some((0, 33, 1)));
        for not_a_release in ["", "main", "0", "x.1", "99999999999.1"] {
            assert_eq!(parse_release(not_a_release), None, "{not_a_release}");
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
