//! What a failure means for an episode: the policy's result with reward 0, or a broken attempt.
//!
//! The invariant: whose doing an error is follows from its kind and the stage alone, never from its
//! message, and the tables are those of `docs/src/outcomes.md`.

use crate::grading::GradeError;
use orchestrate_sandbox::{SandboxError, SandboxErrorKind};
use orchestrate_types::{AbortCause, Attribution, Limit, Outcome, Stage};

/// The outcome of a failure of the infrastructure, at `stage`.
pub(crate) fn failed(stage: Stage, error: impl std::fmt::Display) -> Outcome {
    Outcome::Broken { stage, error: error.to_string() }
}

/// The outcome of an episode that a stop request ends.
pub(crate) fn stopped() -> Outcome {
    Outcome::Aborted { by: AbortCause::Shutdown }
}

/// The outcome of an episode whose change is too large for a grader, whatever limit ended it.
pub(crate) fn change_too_large() -> Outcome {
    Outcome::Truncated { limit: Limit::ChangeSize, reward: 0.0 }
}

/// The outcome of an episode in which the policy's commands, or the tests of its change, made a sandbox
/// unusable, so that nothing is graded.
fn damaged(what: &str) -> Outcome {
    tracing::warn!(what, "the policy's commands damaged a sandbox");
    Outcome::Truncated { limit: Limit::SandboxDamage, reward: 0.0 }
}

/// Who caused an error of a sandbox, at a stage after the policy got control of it.
///
/// Whatever commands can cause is the attempt's own result, because another attempt would reward it.
/// That includes every refusal of the supervisor in the agent's sandbox: it can do what it is asked as
/// long as nothing disturbs it.
fn sandbox_attribution(kind: &SandboxErrorKind, stage: Stage) -> Attribution {
    let is_refused_in_agents_sandbox = matches!(kind, SandboxErrorKind::Refused { .. })
        && matches!(stage, Stage::Exec | Stage::Collect);
    if kind.is_agents_doing() || is_refused_in_agents_sandbox {
        Attribution::Policy
    } else {
        Attribution::Infrastructure
    }
}

/// The outcome of an error of a sandbox, at a stage after the policy got control of it.
pub(crate) fn sandbox_failed(stage: Stage, error: SandboxError) -> Outcome {
    match sandbox_attribution(&error.kind, stage) {
        Attribution::Policy => match (&error.kind, stage) {
            (SandboxErrorKind::TooLarge { .. }, Stage::Collect | Stage::Grade) => {
                tracing::warn!(%error, "the agent's change is too large to grade");
                change_too_large()
            }
            _ => damaged(&error.to_string()),
        },
        Attribution::Environment | Attribution::Infrastructure => failed(stage, error),
    }
}

/// Who caused that a change was not graded. `stage` is that of the sandbox in which it was to be graded:
/// the agent's own one ([`Stage::Collect`]) or another.
fn grading_attribution(error: &GradeError, stage: Stage) -> Attribution {
    match error {
        // The diff was made for this very tree, so only what it contains can be the reason.
        GradeError::Patch(_) | GradeError::NotApplied(_) | GradeError::TooLarge { .. } => {
            Attribution::Policy
        }
        GradeError::NoReward(_) => Attribution::Environment,
        GradeError::Sandbox(error) => sandbox_attribution(&error.kind, stage),
    }
}

/// The outcome of a change that was not graded; `stage` as for [`grading_attribution`].
pub(crate) fn grading_failed(stage: Stage, error: GradeError) -> Outcome {
    match (grading_attribution(&error, stage), error) {
        (_, GradeError::Sandbox(error)) => sandbox_failed(stage, error),
        (Attribution::Policy, error @ GradeError::TooLarge { .. }) => {
            tracing::warn!(%error, "the agent's change is too large to grade");
            change_too_large()
        }
        (Attribution::Policy, error) => damaged(&error.to_string()),
        (Attribution::Environment | Attribution::Infrastructure, error) => {
            failed(Stage::Grade, error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_tasks::patch;
    use orchestrate_types::ByteSize;
    use std::fmt::Debug;
    use std::iter::successors;
    use std::sync::Arc;
    use std::time::Duration;

    /// The kind after this one, for each kind once; the match is to list every kind.
    fn next_kind(kind: &SandboxErrorKind) -> Option<SandboxErrorKind> {
        let text = String::new;
        let source = || -> orchestrate_sandbox::Cause { Arc::new(std::fmt::Error) };
        Some(match kind {
            SandboxErrorKind::NoDaemon(_) => SandboxErrorKind::ImageMissing(text()),
            SandboxErrorKind::ImageMissing(_) => {
                SandboxErrorKind::NotPulled { image: text(), source: source() }
            }
            SandboxErrorKind::NotPulled { .. } => {
                SandboxErrorKind::ImageChanged { image: text(), recorded: text(), found: text() }
            }
            SandboxErrorKind::ImageChanged { .. } => {
                SandboxErrorKind::NotRecorded { image: text(), source: source() }
            }
            SandboxErrorKind::NotRecorded { .. } => {
                SandboxErrorKind::TimedOut { call: "exec", after: Duration::ZERO }
            }
            SandboxErrorKind::TimedOut { .. } => {
                SandboxErrorKind::Refused { call: "exec", message: text() }
            }
            SandboxErrorKind::Refused { .. } => {
                SandboxErrorKind::Failed { call: "exec", source: source() }
            }
            SandboxErrorKind::Failed { .. } => SandboxErrorKind::DiskFull(text()),
            SandboxErrorKind::DiskFull(_) => SandboxErrorKind::Gone(text()),
            SandboxErrorKind::Gone(_) => SandboxErrorKind::Damaged { what: text() },
            SandboxErrorKind::Damaged { .. } => SandboxErrorKind::Protocol(text()),
            SandboxErrorKind::Protocol(_) => SandboxErrorKind::NotClean(text()),
            SandboxErrorKind::NotClean(_) => {
                SandboxErrorKind::TooLarge { what: text(), cap: ByteSize::mib(1) }
            }
            SandboxErrorKind::TooLarge { .. } => SandboxErrorKind::SelfTestFailed(text()),
            SandboxErrorKind::SelfTestFailed(_) => return None,
        })
    }

    /// Like [`next_kind`]; the kinds of [`GradeError::Sandbox`] are those above.
    fn next_error(error: &GradeError) -> Option<GradeError> {
        Some(match error {
            GradeError::Patch(_) => GradeError::NotApplied(String::new()),
            GradeError::NotApplied(_) => {
                GradeError::TooLarge { needed: ByteSize::mib(2), room: ByteSize::mib(1) }
            }
            GradeError::TooLarge { .. } => GradeError::NoReward(String::new()),
            GradeError::NoReward(_) => GradeError::Sandbox(SandboxError {
                sandbox: String::new(),
                kind: SandboxErrorKind::Gone(String::new()),
            }),
            GradeError::Sandbox(_) => return None,
        })
    }

    fn name(error: &impl Debug) -> String {
        let text = format!("{error:?}");
        text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
    }

    /// Checks that an outcome is the one that the attribution stands for.
    fn check(outcome: &Outcome, whose: Attribution, name: &str) {
        let is_result = matches!(
            outcome,
            Outcome::Truncated { limit: Limit::ChangeSize | Limit::SandboxDamage, reward: 0.0 }
        );
        assert_eq!(is_result, whose == Attribution::Policy, "{name}: {outcome:?}");
        let is_broken = matches!(outcome, Outcome::Broken { .. });
        assert_eq!(is_broken, !is_result, "{name}: {outcome:?}");
    }

    #[test]
    fn every_error_of_a_sandbox_and_of_grading_is_documented_with_whose_doing_it_is() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/outcomes.md");
        let page = fs_err::read_to_string(path).unwrap();
        let first = SandboxErrorKind::NoDaemon(Arc::new(std::fmt::Error));
        let kinds: Vec<_> = successors(Some(first), next_kind).collect();
        assert_eq!(kinds.len(), 15);
        for kind in kinds {
            let name = name(&kind);
            let [agent, grader] = [Stage::Collect, Stage::Grade].map(|stage| {
                let whose = sandbox_attribution(&kind, stage);
                let error = || SandboxError { sandbox: "s".to_owned(), kind: kind.clone() };
                check(&sandbox_failed(stage, error()), whose, &name);
                check(&grading_failed(stage, GradeError::Sandbox(error())), whose, &name);
                whose
            });
            assert_eq!(sandbox_attribution(&kind, Stage::Exec), agent, "{name}");
            let is_policys = matches!(name.as_str(), "Damaged" | "TooLarge");
            assert_eq!(is_policys, grader == Attribution::Policy, "{name}");
            assert_eq!(is_policys || name == "Refused", agent == Attribution::Policy, "{name}");
            let row = format!("| `{name}` | {} | {} |", agent.name(), grader.name());
            assert!(page.contains(&row), "docs/src/outcomes.md lacks {row}");
        }
        let first =
            patch::apply(&[], "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n").map(drop).unwrap_err();
        let errors: Vec<_> = successors(Some(GradeError::Patch(first)), next_error).collect();
        assert_eq!(errors.len(), 5);
        for error in errors.into_iter().filter(|error| !matches!(error, GradeError::Sandbox(_))) {
            let (name, whose) = (name(&error), grading_attribution(&error, Stage::Grade));
            let row = format!("| `{name}` | {} |", whose.name());
            assert!(page.contains(&row), "docs/src/outcomes.md lacks {row}");
            check(&grading_failed(Stage::Grade, error), whose, &name);
        }
    }
}
