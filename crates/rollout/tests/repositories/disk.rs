//! A container that fills the host's disk breaks attempts of others, but never gives them a
//! verdict.

use crate::{FIX, bash, folder, play, r2e_task, scored, submit};
use camino::Utf8Path;
use orchestrate_e2e::Daemon;
use orchestrate_rollout::{EpisodeReport, RewardSettings, RolloutSection};
use orchestrate_sandbox::{
    Command, DockerProvider, Owner, Purpose, Sandbox, SandboxProvider as _, SandboxSection,
    SandboxSpec,
};
use orchestrate_tasks::Task;
use orchestrate_types::{ByteSize, Limit, Outcome, RunId, Stage};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Space for the task's image twice, which loading it takes.
const DISK_MIB: u32 = 1400;
const FILL: &str = "cat /dev/zero > /fill; sleep 15";

/// A correct fix that fails if the disk is full at any of so many moments, 50 ms after each other.
fn writes(moments: u32) -> String {
    format!(
        "cat > calc.py <<'EOF'\nimport time\n\n\ndef total(items):\n    for _ in range({moments}):\n        \
         with open('/var/tmp/probe', 'wb') as probe:\n            probe.write(bytes(1 << 20))\n        \
         time.sleep(0.05)\n    return sum(items)\nEOF"
    )
}

async fn provider(daemon: &Daemon) -> Arc<DockerProvider> {
    let raw = SandboxSection {
        docker_host: Some(daemon.host()),
        max_containers: Some(4),
        min_free_disk: Some(ByteSize::mib(300)),
        ..SandboxSection::default()
    };
    Arc::new(DockerProvider::connect(raw.check().unwrap()).await.unwrap())
}

async fn attempt(
    sandboxes: &Arc<DockerProvider>,
    task: &Task,
    command: &str,
    logs: &Utf8Path,
) -> EpisodeReport {
    let (config, reward) = (RolloutSection::default(), RewardSettings::default());
    play(sandboxes, task, &[bash(command), submit()], &config, reward, logs).await
}

/// Waits for the grader's container, then fills the disk from a container of another run.
async fn fill_while_grading(
    daemon: &Daemon,
    sandboxes: &DockerProvider,
    task: &Task,
) -> Box<dyn Sandbox> {
    let spec = SandboxSpec {
        image: task.image.clone(),
        purpose: Purpose::Agent,
        owner: Owner {
            run: RunId::generate(),
            epoch: 1,
            attempt: "t000001.00-a01".parse().unwrap(),
        },
        workdir: task.workdir.clone(),
        limits: sandboxes.config().limits(),
        deadline: Duration::from_mins(5),
        reusable: false,
    };
    let mut filler = sandboxes.open(&spec).await.unwrap();
    let graders = ["ps", "-q", "--filter", "label=orchestrate.purpose=grader"];
    let began = Instant::now();
    while daemon.docker(&graders).unwrap().stdout.is_empty() {
        assert!(began.elapsed() < Duration::from_mins(5), "no grader was started");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let error = filler.exec(&Command::shell(FILL, Duration::from_mins(8))).await.unwrap_err();
    assert!(error.to_string().contains("disk is full"), "{error}");
    filler
}

fn broken(report: &EpisodeReport, expected: Stage) {
    let Outcome::Broken { stage, error } = &report.outcome else {
        unreachable!("not broken: {:?}", report.outcome);
    };
    assert_eq!(*stage, expected, "{error}");
    assert!(error.contains("the Docker host's disk is full"), "{error}");
    assert!(report.verdict.is_none());
}

#[tokio::test]
async fn docker_full_disk_breaks_attempts_and_gives_no_verdict() {
    let Some(task) = r2e_task() else { return };
    let Some(daemon) = Daemon::start_small(DISK_MIB).unwrap() else {
        orchestrate_e2e::skip::skip("daemons", "cannot start a second daemon on a small disk");
        return;
    };
    daemon.load(&task.image).unwrap();
    let (_kept, logs) = folder();
    // Two programs that use one daemon independently.
    let (ours, theirs) = (provider(&daemon).await, provider(&daemon).await);

    // Longer than it takes to fill the disk.
    let long = writes(2000);
    let (report, filler) = tokio::join!(
        attempt(&ours, &task, &long, &logs),
        fill_while_grading(&daemon, &theirs, &task)
    );
    broken(&report, Stage::Grade);

    filler.close().await.unwrap();
    theirs.shutdown().await.unwrap();
    let report = attempt(&ours, &task, &writes(80), &logs).await;
    assert!(scored(&report) > 0.5, "{:?}", report.verdict);

    // An agent that fills the disk itself gets no observation and no other attempt, and leaves nothing.
    let report = attempt(&ours, &task, FILL, &logs).await;
    assert_eq!(report.outcome, Outcome::Truncated { limit: Limit::SandboxDamage, reward: 0.0 });
    assert_eq!(report.turns[0].observation, "");
    let report = attempt(&ours, &task, FIX, &logs).await;
    assert!(scored(&report) > 0.5, "{:?}", report.verdict);
    ours.shutdown().await.unwrap();
}
