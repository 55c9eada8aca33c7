//! Policies that attack the collection of their change, or break a sandbox to get another attempt.

use crate::{FIX, Task, docker, episode, folder, r2e_task, scored};
use orchestrate_rollout::{EpisodeReport, RewardSettings, RolloutSection};
use orchestrate_types::{HumanDuration, Limit, Outcome};
use std::time::{Duration, Instant};

/// Puts a program in place of git that does `$1` when it makes a diff.
fn replace_git(action: &str) -> String {
    format!(
        "cp /usr/bin/git /usr/bin/git.real && printf '%s\\n' '#!/bin/sh' \
         'case \" $* \" in *\" diff-tree \"*|*\" write-tree \"*) {action};; esac' \
         'exec /usr/bin/git.real \"$@\"' > /usr/bin/git.new && chmod +x /usr/bin/git.new && \
         mv /usr/bin/git.new /usr/bin/git && git --version"
    )
}

async fn attack(task: &Task, commands: &[&str]) -> EpisodeReport {
    let (_kept, logs) = folder();
    // Commands that write much take long on a slow disk.
    let command_timeout = Some(HumanDuration::secs(600));
    let config = RolloutSection { command_timeout, ..RolloutSection::default() };
    episode(task, commands, &config, RewardSettings::default(), &logs).await
}

#[tokio::test]
async fn docker_git_of_the_agent_has_no_part_in_its_patch() {
    let Some(task) = r2e_task() else { return };
    let forged = replace_git(
        "printf \"diff --git a/.venv/evil.pth b/.venv/evil.pth\\nnew file mode 100644\\n--- /dev/null\\n\
         +++ b/.venv/evil.pth\\n@@ -0,0 +1 @@\\n+import os\\n\"",
    );
    let report = attack(&task, &[&forged]).await;
    assert!(report.turns[0].observation.contains("git version"), "{:?}", report.turns);
    assert_eq!(report.patch, "");
    assert!(scored(&report) < 0.5);

    // The same as files: neither environments nor files without source are part of a change.
    let planted = "for place in .venv env/lib lib/site-packages .; do mkdir -p $place; \
         echo 'import os' | tee $place/evil.pth $place/x.pyc $place/sitecustomize.py > /dev/null; done; \
         touch env/pyvenv.cfg; echo x > env/x.py; ln -s /etc/passwd outside; mkdir -p sub/.git; \
         echo x > sub/.git/config; ls evil.pth";
    let report = attack(&task, &[planted, FIX]).await;
    assert!(report.turns[0].observation.contains("evil.pth"), "{:?}", report.turns);
    assert!(scored(&report) > 0.5, "{:?}", report.verdict);
    assert_eq!(report.patch.matches("diff --git ").count(), 1, "{}", report.patch);
}

#[tokio::test]
async fn docker_git_that_kills_its_parent_gives_no_second_attempt() {
    let Some(task) = r2e_task() else { return };
    let killer = replace_git("kill -9 $PPID");
    let report = attack(&task, &[&killer, FIX]).await;
    assert!(scored(&report) > 0.5, "{:?}", report.verdict);
}

/// Whatever is done to the agent's sandbox, the attempt has a trusted outcome.
#[tokio::test]
async fn docker_damage_to_the_agents_sandbox_is_its_own_result() {
    let Some(task) = r2e_task() else { return };
    let limits = "python3 -c \"import resource as r; \
         r.prlimit(1, r.RLIMIT_NOFILE, (3, 3))\"; echo done";
    let memory =
        "python3 -c \"import resource as r; r.prlimit(1, r.RLIMIT_AS, (1, 1))\"; echo done";
    let processes =
        "python3 -c \"import resource as r; r.prlimit(1, r.RLIMIT_NPROC, (1, 1))\"; echo done";
    for damage in [
        limits,
        memory,
        processes,
        "chmod -R 000 /testbed; echo done",
        "cd /; mv /testbed /elsewhere; ln -s /elsewhere /testbed; echo done",
        "cd /; rm -rf /testbed; echo x > /testbed; echo done",
        "rm -rf /bin /usr/bin /lib 2>/dev/null; echo done",
        "d=.; for i in $(seq 300); do d=$d/d; done; mkdir -p $d; echo done",
        "python3 -c \"x = [bytearray(1 << 20) for _ in range(1 << 20)]\"; echo done",
        ":(){ :|:& };: 2>/dev/null; sleep 1; echo done",
    ] {
        let report = attack(&task, &[FIX, damage, "echo after"]).await;
        let reward = report.outcome.trusted_reward();
        assert!(reward.is_some(), "{damage}: {:?}", report.outcome);
    }
}

/// Whatever the change does to the grader, the attempt has a trusted outcome without a reward.
#[tokio::test]
async fn docker_damage_to_the_grader_is_the_attempts_own_result() {
    let Some(mut task) = r2e_task() else { return };
    task.test_timeout = Duration::from_secs(20);
    let module = |body: &str| {
        format!(
            "printf '%s\\n' 'import os, resource, signal, sys' '{body}' > calc.py; rm -rf tests/x"
        )
    };
    for body in [
        "os.kill(os.getppid(), 9)",
        "[resource.prlimit(1, kind, (0, 0)) for kind in range(16)]",
        "x = [bytearray(1 << 20) for _ in range(1 << 20)]",
        "while True: os.fork()",
        "os.kill(-1, 9)",
        "os.rename(\"/testbed\", \"/gone\")",
    ] {
        let report = attack(&task, &[&module(body)]).await;
        let reward = report.outcome.trusted_reward();
        assert!(reward.is_some_and(|reward| reward < 0.5), "{body}: {:?}", report.outcome);
    }
    // A change that does not fit into the tree without its excluded part.
    let report = attack(&task, &[FIX, "rm -rf tests; echo 'a = 1' > tests"]).await;
    let reward = report.outcome.trusted_reward();
    assert!(reward.is_some(), "{:?}", report.outcome);
}

#[tokio::test]
async fn docker_hostile_trees_are_bounded() {
    let Some(task) = r2e_task() else { return };
    let too_large = Outcome::Truncated { limit: Limit::ChangeSize, reward: 0.0 };
    let newlines = "yes '' | head -c 120000000 > newlines.py; wc -c < newlines.py";
    let many =
        "python3 -c \"\nfor n in range(120000): open('f%d.py' % n, 'w').close()\"; echo made";
    for (tree, expected) in [(newlines, "120000000"), (many, "made")] {
        let began = Instant::now();
        let report = attack(&task, &[tree]).await;
        assert!(report.turns[0].observation.contains(expected), "{:?}", report.turns);
        assert_eq!(report.outcome, too_large, "{tree}");
        assert!(report.patch.is_empty());
        assert!(began.elapsed() < Duration::from_mins(10), "{tree}: {:?}", began.elapsed());
    }
    // Rewriting every file of the tree leaves the change empty.
    let touched =
        "find . -type f -not -path './.git/*' -exec sed -i '' {} +; git stash list; echo same";
    let report = attack(&task, &[touched, FIX]).await;
    assert!(scored(&report) > 0.5, "{:?}", report.verdict);
    assert_eq!(report.patch.matches("diff --git ").count(), 1, "{}", report.patch);
    assert!(docker(&["version"]).is_some());
}
