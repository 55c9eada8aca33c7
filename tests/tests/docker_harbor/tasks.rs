//! Small Harbor tasks on the image of the micro environment. Each tests one rule.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Writes the expected content to `/app/out`.
const SOLVE: &str = "#!/bin/bash\necho done > /app/out\n";
/// Rewards 1 if `/app/out` has the expected content.
const TEST: &str = "#!/bin/bash\nif [ \"$(cat /app/out 2>/dev/null)\" = done ]; then r=1; else r=0; fi\n\
     echo $r > /logs/verifier/reward.txt\n";
const DOCKERFILE: &str = "FROM orchestrate/micro:latest\nWORKDIR /app\n";

/// A task folder: path and content of its files.
pub(crate) struct TaskFolder {
    pub(crate) name: &'static str,
    /// Rewards of the solution and of doing nothing, by this program's rule.
    pub(crate) rewards: [f64; 2],
    files: Vec<(&'static str, &'static str)>,
}

impl TaskFolder {
    pub(crate) fn write(&self, folder: &Path) {
        for (path, content) in &self.files {
            let path = folder.join(self.name).join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, content).unwrap();
            let mode = if content.starts_with("#!") { 0o755 } else { 0o644 };
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
    }
}

/// A task with the usual files. `changes` replaces or adds files.
fn task(
    name: &'static str,
    rewards: [f64; 2],
    config: &'static str,
    changes: &[(&'static str, &'static str)],
) -> TaskFolder {
    let usual = [
        ("instruction.md", "Write `done` to /app/out.\n"),
        ("environment/Dockerfile", DOCKERFILE),
        ("tests/test.sh", TEST),
        ("solution/solve.sh", SOLVE),
    ];
    let is_changed = |path: &str| changes.iter().any(|(changed, _)| *changed == path);
    let mut files: Vec<_> = usual.into_iter().filter(|(path, _)| !is_changed(path)).collect();
    // Empty content removes a usual file.
    files.extend(changes.iter().filter(|(_, content)| !content.is_empty()));
    files.push(("task.toml", config));
    TaskFolder { name, rewards, files }
}

/// All tasks that are compared with Harbor. Each runs in seconds.
pub(crate) fn tasks() -> Vec<TaskFolder> {
    let mut tasks = plain();
    tasks.extend(rewards());
    tasks.extend(separate());
    tasks.extend(steps());
    tasks
}

fn plain() -> Vec<TaskFolder> {
    vec![
        task("plain", [1.0, 0.0], "schema_version = \"1.4\"\n", &[]),
        task(
            "first-format",
            [1.0, 0.0],
            "version = \"1.0\"\n[environment]\nmemory = \"1G\"\nstorage = \"2G\"\ncpus = 1\n\
             allow_internet = true\n[verifier]\ntimeout_sec = \"60\"\n",
            &[],
        ),
        task(
            "packaged",
            [1.0, 0.0],
            "schema_version = \"1.1\"\n[task]\nname = \"org/packaged\"\nauthors = [{ name = \"A\" }]\n\
             keywords = [\"k\"]\n[metadata]\ncategory = \"files\"\nanything = { at = \"all\" }\n",
            &[],
        ),
        task(
            "variables",
            [1.0, 0.0],
            "[environment.env]\nA = \"a\"\nB = \"${ORCHESTRATE_NOT_SET:-b}\"\n[verifier.env]\nC = \"c\"\n\
             [solution.env]\nD = \"d\"\n",
            &[
                ("solution/solve.sh", "#!/bin/bash\necho $A$B$D > out\n"),
                (
                    "tests/test.sh",
                    "#!/bin/bash\n[ \"$(cat out)\" = abd ] && [ $A$B$C = abc ]\n\
                     echo $((1 - $?)) > /logs/verifier/reward.txt\n",
                ),
            ],
        ),
        task(
            "working-directory",
            [1.0, 0.0],
            "[environment]\nworkdir = \"/srv/work\"\n",
            &[
                (
                    "environment/Dockerfile",
                    "FROM orchestrate/micro:latest\nRUN mkdir -p /srv/work\nCOPY data /srv/data\n",
                ),
                ("environment/data/given", "given\n"),
                ("solution/solve.sh", "#!/bin/sh\ncp /srv/data/given here\n"),
                (
                    "tests/test.sh",
                    "#!/bin/bash\ncmp /srv/work/here /srv/data/given && pwd | grep -qx /srv/work\n\
                     echo $((!$?)) > /logs/verifier/reward.txt\n",
                ),
            ],
        ),
        task(
            "prepared-image",
            [1.0, 0.0],
            "[environment]\ndocker_image = \"orchestrate/micro:latest\"\nworkdir = \"/app\"\n",
            &[
                ("environment/Dockerfile", ""),
                ("environment/given/text", "given\n"),
                (
                    "tests/test.sh",
                    "#!/bin/bash\ngrep -qx given /app/given/text && [ -e /app/out ]\n\
                     echo $((!$?)) > /logs/verifier/reward.txt\n",
                ),
            ],
        ),
        task(
            "health-check",
            [1.0, 0.0],
            "[environment.healthcheck]\ncommand = \"test -e /app/second || { touch /app/second; false; }\"\n\
             interval_sec = 0.2\nretries = 3\n",
            &[(
                "tests/test.sh",
                "#!/bin/bash\n[ -e /app/second ] && [ -e /app/out ]\n\
                 echo $((!$?)) > /logs/verifier/reward.txt\n",
            )],
        ),
        task(
            "ignored-tests",
            [1.0, 0.0],
            "",
            &[
                ("tests/.harborignore", "*.log\n!kept.log\nskipped/\n"),
                ("tests/old.log", "x\n"),
                ("tests/kept.log", "x\n"),
                ("tests/skipped/file", "x\n"),
                (
                    "tests/test.sh",
                    "#!/bin/bash\n[ \"$(cd /tests && find . -type f | sort | xargs)\" = \
                     './kept.log ./test.sh' ] && [ -e /app/out ]\n\
                     echo $((!$?)) > /logs/verifier/reward.txt\n",
                ),
            ],
        ),
    ]
}

fn rewards() -> Vec<TaskFolder> {
    let json = |name, rewards, test| task(name, rewards, "", &[("tests/test.sh", test)]);
    vec![
        json(
            "json-reward",
            [0.75, 0.25],
            "#!/bin/bash\n[ -e /app/out ] && r=0.75 || r=0.25\n\
             echo \"{\\\"reward\\\": $r, \\\"style\\\": 1}\" > /logs/verifier/reward.json\n",
        ),
        json(
            "one-named-reward",
            [1.0, 0.0],
            "#!/bin/bash\n[ -e /app/out ] && r=1 || r=0\n\
             echo \"{\\\"accuracy\\\": $r}\" > /logs/verifier/reward.json\n",
        ),
        json(
            "json-before-text",
            [1.0, 0.0],
            "#!/bin/bash\n[ -e /app/out ] && r=1 || r=0\necho 0.5 > /logs/verifier/reward.txt\n\
             echo \"{\\\"reward\\\": $r}\" > /logs/verifier/reward.json\n",
        ),
        json(
            "no-reward",
            [1.0, 0.0],
            "#!/bin/bash\n[ -e /app/out ] && echo 1 > /logs/verifier/reward.txt\n",
        ),
        json(
            "reward-that-is-not-a-number",
            [1.0, 0.0],
            "#!/bin/bash\n[ -e /app/out ] && r=1 || r=none\necho $r > /logs/verifier/reward.txt\n",
        ),
        json(
            "empty-reward",
            [1.0, 0.0],
            "#!/bin/bash\n[ -e /app/out ] && r=1 || r=\nprintf '%s' $r > /logs/verifier/reward.txt\n",
        ),
        json(
            "tests-that-fail",
            [1.0, 0.0],
            "#!/bin/bash\n[ -e /app/out ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\nexit 7\n",
        ),
        task(
            "tests-out-of-time",
            [1.0, 0.0],
            "[verifier]\ntimeout_sec = 20.0\n",
            &[(
                "tests/test.sh",
                "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n[ -e /app/out ] || sleep 300\n",
            )],
        ),
        task(
            "planted-reward",
            [0.0, 0.0],
            "",
            &[
                (
                    "solution/solve.sh",
                    "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n\
                     echo '{\"reward\": 1}' > /logs/verifier/reward.json\n",
                ),
                (
                    "tests/test.sh",
                    "#!/bin/bash\n[ -e /logs/verifier/reward.json ] || echo 0 > /logs/verifier/reward.txt\n",
                ),
            ],
        ),
        task(
            "solution-that-is-wrong",
            [0.0, 0.0],
            "",
            &[("solution/solve.sh", "#!/bin/bash\nexit 1\n")],
        ),
    ]
}

fn separate() -> Vec<TaskFolder> {
    vec![
        task(
            "separate",
            [1.0, 0.0],
            "artifacts = [\"/app/out\"]\n[verifier]\nenvironment_mode = \"separate\"\n",
            &[
                (
                    "tests/test.sh",
                    "#!/bin/bash\n[ ! -e /app/other ] && grep -qx done /app/out\n\
                 echo $((!$?)) > /logs/verifier/reward.txt\n",
                ),
                ("solution/solve.sh", "#!/bin/bash\necho done > /app/out\ntouch /app/other\n"),
            ],
        ),
        task(
            "published",
            [1.0, 0.0],
            "[verifier]\nenvironment_mode = \"separate\"\n[[verifier.collect]]\n\
             command = \"cp /app/out /logs/artifacts/out 2>/dev/null\"\n",
            &[(
                "tests/test.sh",
                "#!/bin/bash\ngrep -qx done /logs/artifacts/out\n\
                 echo $((!$?)) > /logs/verifier/reward.txt\n",
            )],
        ),
        task(
            "bundled-tests",
            [1.0, 0.0],
            "artifacts = [{ source = \"/app/results\", exclude = [\"*.tmp\"] }]\n\
             [verifier.environment]\n[verifier.environment.env]\nWANTED = \"done\"\n",
            &[
                (
                    "tests/Dockerfile",
                    "FROM orchestrate/micro:latest\nWORKDIR /check\nCOPY test.sh /tests/test.sh\n",
                ),
                (
                    "tests/test.sh",
                    "#!/bin/bash\n[ ! -e /app/results/x.tmp ] && grep -qx $WANTED /app/results/deep/out\n\
                     echo $((!$?)) > /logs/verifier/reward.txt\n",
                ),
                (
                    "solution/solve.sh",
                    "#!/bin/bash\nmkdir -p results/deep\necho done > results/deep/out\n\
                     touch results/x.tmp\n",
                ),
            ],
        ),
    ]
}

/// Tasks that reward every agent, and one with several steps.
pub(crate) fn given() -> Vec<TaskFolder> {
    const GIVEN: &str = "#!/bin/bash\n[ \"$GIVEN\" = here ]\n\
                         echo $((!$?)) > /logs/verifier/reward.txt\n";
    let changes = [("tests/test.sh", GIVEN)];
    let mut tasks = vec![
        task("given-shared", [1.0, 1.0], "[environment.env]\nGIVEN = \"here\"\n", &changes),
        task(
            "given-separate",
            [1.0, 1.0],
            "[verifier]\nenvironment_mode = \"separate\"\n[verifier.env]\nGIVEN = \"here\"\n",
            &changes,
        ),
    ];
    tasks.extend(steps().into_iter().take(1));
    tasks
}

/// Tasks whose solutions forge the reward instead of solving them. Harbor rewards these solutions.
pub(crate) fn attacks() -> Vec<TaskFolder> {
    const SILENT: &str = "#!/bin/bash\n[ ! -e /app/out ] || echo 1 > /logs/verifier/reward.txt\n";
    vec![
        task(
            "attack-by-programs",
            [0.0, 0.0],
            "",
            &[
                ("tests/test.sh", SILENT),
                (
                    "solution/solve.sh",
                    "#!/bin/bash\necho '{\"reward\": 1}' > /logs/verifier/reward.json\n\
                     cp /bin/true /bin/rm\n",
                ),
            ],
        ),
        task(
            "attack-by-a-process",
            [0.0, 0.0],
            "",
            &[
                (
                    "tests/test.sh",
                    "#!/bin/bash\nsleep 2\n[ -e /app/out ] || echo 0 > /logs/verifier/reward.txt\n",
                ),
                (
                    "solution/solve.sh",
                    "#!/bin/bash\nsetsid bash -c 'while sleep 0.1; do \
                     echo \"{\\\"reward\\\": 1}\" > /logs/verifier/reward.json; done' \
                     > /dev/null 2>&1 &\n",
                ),
            ],
        ),
        task(
            "attack-by-a-helper",
            [0.0, 0.0],
            "",
            &[
                (
                    "tests/test.sh",
                    "#!/bin/bash\nreward=0\n[ -e /app/out ] && reward=1\n\
                     [ ! -e /tests/settings.sh ] || . /tests/settings.sh\n\
                     echo $reward > /logs/verifier/reward.txt\n",
                ),
                (
                    "solution/solve.sh",
                    "#!/bin/bash\nmkdir -p /tests\necho reward=1 > /tests/settings.sh\n",
                ),
            ],
        ),
    ]
}

const MEAN: &str = "[[steps]]\nname = \"first\"\n[[steps]]\nname = \"second\"\n";
const FINAL: &str = "multi_step_reward_strategy = \"final\"\n[[steps]]\nname = \"first\"\n\
                     [[steps]]\nname = \"second\"\n";
const GATED: &str = "[[steps]]\nname = \"first\"\nmin_reward = 1\n[[steps]]\nname = \"second\"\n";
const STEP_TEST: &str = "#!/bin/bash\n. /tests/shared.sh\nreward /app/two\n";
const SHARED: &str = "reward() { [ -e $1 ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt; }\n";

fn steps() -> Vec<TaskFolder> {
    let files = [
        ("instruction.md", ""),
        ("solution/solve.sh", ""),
        ("tests/shared.sh", SHARED),
        ("tests/test.sh", "#!/bin/bash\n. /tests/shared.sh\nreward /app/one\n"),
        ("steps/first/instruction.md", "Make /app/one.\n"),
        ("steps/first/solution/solve.sh", "#!/bin/bash\ntouch /app/one\n"),
        ("steps/second/instruction.md", "Make /app/two.\n"),
        ("steps/second/workdir/setup.sh", "#!/bin/bash\ntouch /app/set-up\n"),
        ("steps/second/solution/solve.sh", "#!/bin/bash\n[ -e /app/set-up ] && touch /app/two\n"),
        ("steps/second/tests/test.sh", STEP_TEST),
    ];
    let half =
        [files.as_slice(), &[("steps/second/solution/solve.sh", "#!/bin/bash\n:\n")]].concat();
    let half: Vec<_> = half.into_iter().rev().collect();
    vec![
        task("two-steps", [1.0, 0.0], MEAN, &files),
        task("half-of-two-steps", [0.5, 0.0], MEAN, &unique(&half)),
        task("last-step", [0.0, 0.0], FINAL, &unique(&half)),
        task("gated-steps", [1.0, 0.0], GATED, &files),
    ]
}

/// The first entry of each path.
fn unique(files: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
    let mut kept: Vec<(&str, &str)> = Vec::new();
    for file in files {
        if kept.iter().all(|(path, _)| *path != file.0) {
            kept.push(*file);
        }
    }
    kept
}
