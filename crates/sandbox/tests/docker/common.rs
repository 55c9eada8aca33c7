//! Fixtures and helpers for the tests on a real daemon.

use orchestrate_sandbox::{
    Command, DockerProvider, ExecResult, Owner, Purpose, Sandbox, SandboxLimits,
    SandboxProvider as _, SandboxSection, SandboxSpec,
};
use orchestrate_types::{ByteSize, RunId};
use std::time::Duration;

pub(crate) const IMAGE: &str = "orchestrate/micro:latest";
/// Time limit of a command that takes a moment, on a slow machine under load.
pub(crate) const SHORT: Duration = Duration::from_mins(1);

/// One provider and one run per test, so that tests do not interfere with each other.
pub(crate) struct Fixture {
    pub(crate) provider: DockerProvider,
    pub(crate) run: RunId,
}

impl Fixture {
    pub(crate) async fn new() -> Option<Self> {
        Self::with(SandboxSection::default()).await
    }

    pub(crate) async fn with(raw: SandboxSection) -> Option<Self> {
        match DockerProvider::connect(raw.check().unwrap()).await {
            Ok(provider) => Some(Self { provider, run: RunId::generate() }),
            Err(error) => {
                orchestrate_e2e::skip::skip("docker", &error.to_string());
                None
            }
        }
    }

    pub(crate) fn spec(&self, reusable: bool) -> SandboxSpec {
        SandboxSpec {
            image: IMAGE.into(),
            purpose: Purpose::Agent,
            owner: Owner { run: self.run, epoch: 1, attempt: "t000001.00-a01".parse().unwrap() },
            workdir: "/testbed".into(),
            limits: SandboxLimits {
                memory: ByteSize::mib(256),
                cpu_millis: 2000,
                pids: 64,
                tmpfs: ByteSize::mib(64),
            },
            deadline: Duration::from_mins(5),
            reusable,
        }
    }

    pub(crate) async fn open(&self) -> Box<dyn Sandbox> {
        self.provider.open(&self.spec(true)).await.unwrap()
    }

    pub(crate) async fn names(&self) -> Vec<String> {
        let all = self.provider.list().await.unwrap();
        all.into_iter().filter(|info| info.run == Some(self.run)).map(|info| info.name).collect()
    }

    /// Shuts down and checks that no container is left.
    pub(crate) async fn finish(self) {
        self.provider.shutdown().await.unwrap();
        assert_eq!(self.names().await, Vec::<String>::new());
    }
}

pub(crate) async fn run(sandbox: &mut Box<dyn Sandbox>, script: &str) -> ExecResult {
    sandbox.exec(&Command::shell(script, SHORT)).await.unwrap()
}

/// Checks that the sandbox works and that only process 1 and this command are alive in it.
pub(crate) async fn check_alive(sandbox: &mut Box<dyn Sandbox>) {
    let result = run(sandbox, "echo alive; ls -d /proc/[0-9]* | wc -l").await;
    let text = result.text();
    let count: u32 = text.lines().nth(1).unwrap().trim().parse().unwrap();
    assert!(text.starts_with("alive\n") && count <= 4, "{text}");
}

pub(crate) fn docker(args: &[&str]) -> String {
    let output = std::process::Command::new("docker").args(args).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}
