//! `orchestrate config`: check, show, schema, docs.

use crate::args::{CheckArgs, ConfigArgs, ConfigCommand};
use crate::config::{self, ConfigError, Sections, Settings};
use crate::output;
use orchestrate_types::{ConfigProblem, without_credentials};
use serde::Serialize;
use std::process::ExitCode;

/// Runs the command.
pub(crate) fn run(args: ConfigArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        ConfigCommand::Check(args) => check(&args)?,
        ConfigCommand::Show(source) => {
            let plan = config::load(&source)?.with_defaults()?;
            output::data(plan.annotated()?.trim_end());
        }
        ConfigCommand::Schema => output::json(&schemars::schema_for!(Sections))?,
        ConfigCommand::Docs => output::data(Sections::page().trim_end()),
    }
    Ok(ExitCode::SUCCESS)
}

/// What `config check --json` prints.
#[derive(Debug, Serialize)]
struct Checked {
    /// Why no command takes the configuration.
    problems: Vec<Problem>,
    /// Why `orchestrate run` does not take it, although `orchestrate eval` does.
    of_training: Vec<Problem>,
}

/// A problem in [`Checked`].
#[derive(Debug, Serialize)]
struct Problem {
    /// The key, e.g. `run.steps`; absent if a whole file or assignment cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    /// What is wrong, and the remedy.
    message: String,
    /// Where the value was written, e.g. `run.toml:12:8` or `--set run.steps=0`; absent for one that is
    /// missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    origin: Option<String>,
    /// The file in `origin`.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
}

fn problem(problem: &ConfigProblem) -> Problem {
    let origin = problem.origin.as_ref().map(|origin| without_credentials(origin).into_owned());
    let file = origin.as_deref().filter(|origin| !origin.starts_with("--set ")).map(|origin| {
        // A file that cannot be read has no line and no column.
        let mut parts = origin.rsplitn(3, ':');
        let is_number = |part: Option<&str>| part.is_some_and(|part| part.parse::<usize>().is_ok());
        let has_place = is_number(parts.next()) && is_number(parts.next());
        parts.next().filter(|_| has_place).unwrap_or(origin).to_owned()
    });
    let message = ConfigProblem { origin: None, ..problem.clone() }.to_string();
    let key = Some(problem.key.clone()).filter(|key| !key.is_empty());
    Problem { key, message, origin, file }
}

fn problems(error: &ConfigError) -> Vec<Problem> {
    match error {
        ConfigError::Problems(found) => found.iter().map(problem).collect(),
        ConfigError::Unreadable { .. } | ConfigError::Layer { .. } => {
            let message = without_credentials(&error.to_string()).into_owned();
            vec![Problem { key: None, message, origin: None, file: None }]
        }
    }
}

/// Checks a configuration. Also with `--json` an invalid one is an error, after its problems were printed.
fn check(args: &CheckArgs) -> anyhow::Result<()> {
    let checked = config::load(&args.source).and_then(|sections| sections.check());
    let trains = checked.as_ref().map_or(Ok(()), Settings::check_training);
    if args.json {
        output::json(&Checked {
            problems: checked.as_ref().err().map(problems).unwrap_or_default(),
            of_training: trains.as_ref().err().map(problems).unwrap_or_default(),
        })?;
    }
    checked?;
    if !args.json {
        output::say("no problems in the configuration");
        if let Err(error) = trains {
            output::say(format!(
                "note: for orchestrate eval only; orchestrate run refuses it: {error}"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_in_json_has_the_file_of_its_origin() {
        let of = |origin: Option<&str>| {
            let wrong = ConfigProblem::new("run.steps", 0, "must be at least 1");
            let found = problem(&ConfigProblem { origin: origin.map(str::to_owned), ..wrong });
            assert_eq!(found.key.as_deref(), Some("run.steps"));
            assert_eq!(found.message, "run.steps = 0: must be at least 1");
            (found.origin, found.file)
        };
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(of(Some("a:b.toml:3:8")), (text("a:b.toml:3:8"), text("a:b.toml")));
        assert_eq!(of(Some("absent.toml")), (text("absent.toml"), text("absent.toml")));
        assert_eq!(of(Some("--set run.steps=0")), (text("--set run.steps=0"), None));
        assert_eq!(of(None), (None, None));
    }
}
