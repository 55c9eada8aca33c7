//! The tool servers of a run, and the record of their tools in its folder.

use crate::config::Settings;
use crate::files::write_whole;
use crate::output;
use anyhow::Context as _;
use camino::Utf8Path;
use orchestrate_rollout::ToolServers;
use std::io;
use std::sync::Arc;

/// The tools that the servers listed when the run began.
const TOOLS_FILE: &str = "tool-servers.json";

/// Connects the tool servers. A run that is resumed must find the tools that it began with, because its
/// groups may be half done.
pub(crate) async fn connect(
    settings: &Settings,
    folder: &Utf8Path,
) -> anyhow::Result<Arc<ToolServers>> {
    if settings.rollout.tool_servers.is_empty() {
        return Ok(Arc::default());
    }
    let servers = ToolServers::connect(&settings.rollout.tool_servers).await?;
    let file = folder.join(TOOLS_FILE);
    match fs_err::read_to_string(&file) {
        Ok(record) => servers.check_recorded(&record).with_context(|| file.to_string())?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            write_whole(&file, &servers.record()?)?;
        }
        Err(error) => return Err(error.into()),
    }
    let names: Vec<&str> = servers.names().collect();
    output::say(format!("tools of tool servers: {}", names.join(", ")));
    Ok(Arc::new(servers))
}
