//! `orchestrate config`: check, show, schema, docs.

use crate::args::{ConfigArgs, ConfigCommand};
use crate::config::{self, Sections};
use crate::output;
use std::process::ExitCode;

/// Runs the command.
pub(crate) fn run(args: ConfigArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        ConfigCommand::Check(source) => {
            let settings = config::load(&source)?.check()?;
            output::say("no problems in the configuration");
            if let Err(error) = settings.check_training() {
                output::say(format!(
                    "note: for orchestrate eval only; orchestrate run refuses it: {error}"
                ));
            }
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
