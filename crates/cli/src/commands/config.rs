//! `orchestrate config`: check, show, schema, docs.

use crate::args::{ConfigArgs, ConfigCommand};
use crate::config::{self, Sections};
use crate::output;
use std::process::ExitCode;

/// Runs the command.
pub(crate) fn run(args: ConfigArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        ConfigCommand::Check(source) => {
            config::load(&source)?.check()?;
            output::say("no problems in the configuration");
        }
        ConfigCommand::Show(source) => {
            let plan = config::load(&source)?.with_defaults()?;
            output::data(plan.annotated()?.trim_end());
        }
        ConfigCommand::Schema => output::json(&schemars::schema_for!(Sections))?,
        ConfigCommand::Docs => output::data(Sections::page().trim_end()),
    }
    Ok(ExitCode::SUCCESS)
}
