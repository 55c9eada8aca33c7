//! `orchestrate config`: check, show, schema.

use crate::args::{ConfigArgs, ConfigCommand};
use crate::config::{self, RawConfig};
use crate::output;
use std::process::ExitCode;

/// Runs the command.
pub(crate) fn run(args: ConfigArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        ConfigCommand::Check(source) => {
            config::load::<RawConfig>(&source)?.check()?;
            output::say("the config is sound");
        }
        ConfigCommand::Show(source) => {
            let plan = config::load::<RawConfig>(&source)?.with_defaults()?;
            output::data(toml::to_string(&plan)?.trim_end());
        }
        ConfigCommand::Schema => output::json(&schemars::schema_for!(RawConfig))?,
    }
    Ok(ExitCode::SUCCESS)
}
