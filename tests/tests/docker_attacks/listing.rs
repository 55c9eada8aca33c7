//! Compares a sandbox that served an attacker with a new one.

use crate::play::World;
use orchestrate_e2e::root;
use orchestrate_sandbox::{Command, Purpose, Sandbox, SandboxProvider as _};
use orchestrate_tasks::Task;
use std::collections::BTreeSet;
use std::time::Duration;

/// The program that lists what a sandbox keeps.
fn script() -> String {
    std::fs::read_to_string(root().join("tests/tests/docker_attacks/listing.py")).unwrap()
}

/// Everything that a new agent's and a new grader's sandbox keep, as lines.
#[derive(Debug)]
pub(crate) struct Listing {
    agent: BTreeSet<String>,
    grader: BTreeSet<String>,
}

async fn lines(sandbox: &mut dyn Sandbox) -> Result<BTreeSet<String>, String> {
    let argv = ["python3", "-I", "-S", "-B", "-c", &script()].map(str::to_owned).to_vec();
    let mut command = Command::shell("", Duration::from_secs(30));
    command.argv = argv;
    command.keep_bytes = 4 << 20;
    let result = sandbox.exec(&command).await.map_err(|error| error.to_string())?;
    if !result.success() {
        return Err(result.text());
    }
    Ok(result.text().lines().map(str::to_owned).collect())
}

impl Listing {
    pub(crate) async fn of_new(world: &World, task: &Task) -> Self {
        let mut found = Vec::new();
        for purpose in [Purpose::Agent, Purpose::Grader] {
            let mut spec = world.spec(task, purpose);
            // Under another epoch, so that no other episode gets this sandbox.
            spec.owner.epoch = 2;
            let mut sandbox = world.provider.open(&spec).await.unwrap();
            found.push(lines(sandbox.as_mut()).await.unwrap());
            sandbox.close().await.unwrap();
        }
        let grader = found.pop().unwrap();
        Self { agent: found.pop().unwrap(), grader }
    }

    /// Opens as many sandboxes of each purpose as attackers may have used, and compares each with a
    /// new one.
    pub(crate) async fn differences(
        &self,
        world: &World,
        task: &Task,
        count: usize,
    ) -> Vec<String> {
        let mut differences = Vec::new();
        for (purpose, new) in [(Purpose::Agent, &self.agent), (Purpose::Grader, &self.grader)] {
            let mut open = Vec::new();
            for _ in 0..count {
                match world.provider.open(&world.spec(task, purpose)).await {
                    Ok(sandbox) => open.push(sandbox),
                    Err(error) => differences.push(format!("{purpose:?}: not opened: {error}")),
                }
            }
            for mut sandbox in open {
                match lines(sandbox.as_mut()).await {
                    Ok(now) => {
                        let more = now.difference(new).map(|line| format!("+{line}"));
                        let less = new.difference(&now).map(|line| format!("-{line}"));
                        differences
                            .extend(more.chain(less).map(|line| format!("{purpose:?}: {line}")));
                    }
                    Err(error) => differences.push(format!("{purpose:?}: not listed: {error}")),
                }
                if let Err(error) = sandbox.close().await {
                    differences.push(format!("{purpose:?}: not closed: {error}"));
                }
            }
        }
        differences
    }
}
