//! Compares which task folders are accepted here and by the `harbor` package. `ORCHESTRATE_HARBOR`
//! names the package's virtual environment.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use camino::Utf8Path;
use orchestrate_e2e::skip;
use orchestrate_tasks::harbor::{HarborProblem, read_task};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Prints `1` for each folder that the package accepts, else `0` and its reason.
const ORACLE: &str = "import sys, warnings\nwarnings.simplefilter('ignore')\n\
    from harbor.models.task.task import Task\nfor path in sys.argv[1:]:\n    try:\n        Task(path)\n\
    \x20       print('1')\n    except Exception as error:\n        print('0', str(error).replace('\\n', ' ')[:150])\n";

/// Contents of `task.toml`: accepted and refused, one rule each.
const CONFIGS: &[&str] = &[
    "",
    "not toml",
    "version = \"1.0\"",
    "version = 1.0",
    "schema_version = \"1.1\"\nversion = \"1.0\"",
    "schema_version = 1",
    "unknown = 1\n[unknown_section]\nx = 1",
    "[task]\nname = \"org/name\"",
    "[task]\nname = \"name\"",
    "[task]\nname = \"a/b/c\"",
    "[task]\nname = \".a/b\"",
    "[task]\nname = \"a/b..c\"",
    "[task]\ndescription = \"no name\"",
    "[task]\nname = \"org/name\"\nversion = \"\"",
    "[task]\nname = \"org/name\"\nauthors = [{ email = \"x\" }]",
    "[task]\nname = \"org/name\"\nauthors = [{ name = \"x\", email = \"y\" }]\nkeywords = [\"a\"]",
    "[task]\nname = \"org/name\"\nkeywords = [1]",
    "[metadata]\nany = [1, \"two\", { three = 3 }]",
    "metadata = 1",
    "source = 1",
    "[environment]\nos = \"Linux\"",
    "[environment]\nos = \"plan9\"",
    "[environment]\ncpus = 2\nmemory_mb = 2048\nstorage_mb = 10240\ngpus = 0",
    "[environment]\ncpus = 0.5",
    "[environment]\ncpus = inf",
    "[environment]\ncpus = \"2\"",
    "[environment]\ncpus = \"two\"",
    "[environment]\nmemory_mb = 1.5",
    "[environment]\nmemory_mb = 2.0",
    "[environment]\nmemory_mb = \"2048\"",
    "[environment]\nmemory = \"2G\"\nstorage = \"512M\"",
    "[environment]\nmemory = \"2\"",
    "[environment]\nmemory = \"2G\"\nmemory_mb = 2048",
    "[environment]\nmemory = \"2G\"\nmemory_mb = 1",
    "[environment]\nmemory = \"1.5g\"",
    "[environment]\nmemory = 2048",
    "[environment]\nstorage = \"xG\"",
    "[environment]\nbuild_timeout_sec = \"60\"",
    "[environment]\nbuild_timeout_sec = true",
    "[environment]\nbuild_timeout_sec = \"soon\"",
    "[environment]\nallow_internet = false",
    "[environment]\nallow_internet = \"no\"",
    "[environment]\nallow_internet = \"maybe\"",
    "[environment]\nallow_internet = 2",
    "[environment]\nnetwork_mode = \"no-network\"",
    "[environment]\nnetwork_mode = \"none\"",
    "[environment]\nallowed_hosts = []",
    "[environment]\nallowed_hosts = [\"a.com\"]",
    "[environment]\nnetwork_mode = \"allowlist\"\nallowed_hosts = [\"a.com\", \"*.b.org\", \"10.0.0.0/8\"]",
    "[environment]\nnetwork_mode = \"allowlist\"\nallowed_hosts = [\"https://a.com\"]",
    "[environment]\nnetwork_mode = \"allowlist\"\nallowed_hosts = [\"a.com:443\"]",
    "[environment]\nnetwork_mode = \"allowlist\"\nallowed_hosts = [\"10.0.0.1/8\"]",
    "[environment]\nnetwork_mode = \"allowlist\"\nallowed_hosts = [\"*.10.0.0.1\"]",
    "[environment]\nnetwork_mode = \"allowlist\"\nallowed_hosts = [\"fe80::1%eth0\"]",
    "[environment]\nnetwork_mode = \"allowlist\"\nallowed_hosts = [\"2001:DB8::1\"]",
    "[environment]\nnetwork_mode = \"public\"\nallowed_hosts = [\"a.com\"]",
    "[environment]\nallow_internet = false\nallowed_hosts = [\"a.com\"]",
    "[environment.env]\nA = \"b\"",
    "[environment.env]\nA = 1",
    "[environment.env]\nA = \"${HOME:-x}\"",
    "[environment.healthcheck]\ncommand = \"true\"\nretries = 1",
    "[environment.healthcheck]\nretries = 1",
    "[environment.healthcheck]\ncommand = \"true\"\nretries = 1.5",
    "[environment]\nworkdir = \"/app\"\nskills_dir = \"/skills\"\ngpu_types = [\"H100\"]",
    "[environment]\ngpu_types = \"H100\"",
    "[agent]\ntimeout_sec = 60",
    "[agent]\ntimeout_sec = \"x\"",
    "[agent]\nuser = \"root\"",
    "[agent]\nuser = 0",
    "[agent]\nuser = [1]",
    "[agent]\nallowed_hosts = []",
    "[agent]\nnetwork_mode = \"no-network\"",
    "[agent]\nnetwork_mode = \"no-network\"\nallowed_hosts = [\"a.com\"]",
    "[verifier]\ntimeout_sec = 60\nenvironment_mode = \"separate\"",
    "[verifier]\nenvironment_mode = \"other\"",
    "[verifier]\nenvironment_mode = \"shared\"\n[verifier.environment]\ncpus = 1",
    "[verifier.environment]\ncpus = 1",
    "[verifier.environment]\nos = \"x\"",
    "[[verifier.collect]]\ncommand = \"true\"",
    "[[verifier.collect]]\nservice = \"main\"",
    "[[verifier.collect]]\ncommand = \"true\"\nservice = \"bad name\"",
    "[[verifier.collect]]\ncommand = \"true\"\ntimeout_sec = \"1\"",
    "artifacts = [\"/app/out\"]",
    "artifacts = [\"/app/../out\"]",
    "artifacts = [1]",
    "artifacts = [{ source = \"/a\", destination = \"b\", exclude = [\"*.x\"] }]",
    "artifacts = [{ source = \"/a\", destination = \"/b\" }]",
    "artifacts = [{ source = \"/a\", destination = \"../b\" }]",
    "artifacts = [{ source = \"/a\", destination = \".\" }]",
    "artifacts = [{ source = \"/a\", destination = \"manifest.json\" }]",
    "artifacts = [{ source = \"/a\", destination = \"\" }]",
    "artifacts = [{ destination = \"b\" }]",
    "artifacts = [{ source = \"a\", service = \"main\" }]",
    "artifacts = [{ source = \"a\", service = \"db\" }]",
    "[solution.env]\nA = \"b\"",
    "[solution]\nenv = 1",
    "multi_step_reward_strategy = \"mean\"",
    "multi_step_reward_strategy = \"median\"",
    "steps = []",
    "[[steps]]\nname = \"one\"",
    "[[steps]]\nname = \"one\"\nmin_reward = 0.5\n[[steps]]\nname = \"two\"\n[steps.min_reward]\nreward = 1",
    "[[steps]]\nname = \"one\"\n[[steps]]\nname = \"one\"",
    "[[steps]]\nname = \"one\"\n[[steps]]\nname = \"ONE\"",
    "[[steps]]\nname = \"missing\"",
    "[[steps]]\nname = \"../one\"",
    "[[steps]]\nname = \"con\"",
    "[[steps]]\nname = \"one.\"",
    "[[steps]]\nname = \"one\"\nmin_reward = \"x\"",
    "[[steps]]\nname = \"one\"\n[steps.verifier]\ntimeout_sec = 5\n[steps.agent]\ntimeout_sec = 5",
    "[[steps]]\nname = \"one\"\n[steps.healthcheck]\ninterval_sec = 1",
    "[[steps]]\nverifier = {}",
];

fn write(folder: &Path, files: &[(&str, &str)]) {
    for (path, content) in files {
        let path = folder.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
}

/// Contents of `task.toml` that Harbor accepts, but cannot mean, with parts of the reason.
const MISTAKES: &[(&str, &[&str])] = &[
    ("version = \"9.9\"", &["task.toml: version = \"9.9\"", "1.0, 1.1, 1.2, 1.3 and 1.4"]),
    ("schema_version = \"2.0\"", &["task.toml: schema_version = \"2.0\""]),
    ("schema_verson = \"1.0\"", &["task.toml: has the key `schema_verson`", "`schema_version`?"]),
    ("[enviroment]\ncpus = 1", &["task.toml: has the key `enviroment`", "`environment`?"]),
    ("[Verifier]\ntimeout_sec = 60", &["has the key `Verifier`", "`verifier`?"]),
    (
        "[verifier]\ntimeout_secs = 60",
        &["task.toml: [verifier] has the key `timeout_secs`", "`timeout_sec`?"],
    ),
    ("[agent]\ntimeout = 60", &["task.toml: [agent] has the key `timeout`", "`timeout_sec`?"]),
    ("[agent]\ntimeout-sec = 60", &["[agent] has the key `timeout-sec`"]),
    ("[environment]\nallow_internett = false", &["[environment] has the key", "`allow_internet`?"]),
    ("[environment]\nimage = \"a/b\"", &["has the key `image`", "`docker_image`?"]),
    (
        "[verifier.environment]\nwork_dir = \"/app\"",
        &["[environment] has the key `work_dir`", "`workdir`?"],
    ),
    (
        "[environment.healthcheck]\ncommand = \"true\"\nretry = 1\nretires = 2",
        &["[healthcheck] has the key `retires`"],
    ),
    (
        "[[verifier.collect]]\ncommand = \"true\"\ntimeout_s = 1",
        &["[verifier.collect] has the key `timeout_s`"],
    ),
    (
        "[[steps]]\nname = \"one\"\nmin_rewards = 0.5",
        &["[steps] has the key `min_rewards`", "`min_reward`?"],
    ),
    (
        "[[steps]]\nname = \"one\"\nmin_reward = nan",
        &["task.toml: steps.min_reward must be finite"],
    ),
    (
        "[[steps]]\nname = \"one\"\n[steps.min_reward]\nreward = 1\nspeed = -inf",
        &["task.toml: steps.min_reward must be finite"],
    ),
    ("[[steps]]\nname = \"one\"\nmin_reward = 1.5", &["task.toml: steps.min_reward is above 1"]),
    (
        "artifacts = [{ source = \"/a\", destinaton = \"b\" }]",
        &["[artifacts] has the key `destinaton`"],
    ),
    ("[verifier]\ntimeout_sec = 0", &["task.toml: verifier.timeout_sec is 0"]),
    ("[verifier]\ntimeout_sec = \"0.0\"", &["task.toml: verifier.timeout_sec is 0"]),
    ("[agent]\ntimeout_sec = 0.0", &["task.toml: agent.timeout_sec is 0"]),
    ("[environment]\nbuild_timeout_sec = 0", &["task.toml: environment.build_timeout_sec is 0"]),
];

/// Folders with one `task.toml` each, and folders with invalid files.
fn folders(root: &Path) -> Vec<PathBuf> {
    let usual = [
        ("instruction.md", "Do it.\n"),
        ("environment/Dockerfile", "FROM scratch\nWORKDIR /app\n"),
        ("tests/test.sh", "#!/bin/bash\n"),
        ("solution/solve.sh", "#!/bin/bash\n"),
        ("steps/one/instruction.md", "One.\n"),
        ("steps/two/instruction.md", "Two.\n"),
    ];
    let mut folders = Vec::new();
    let mut folder = |config: &str, changes: &dyn Fn(&Path)| {
        let path = root.join(format!("task-{:03}", folders.len()));
        write(&path, &usual);
        write(&path, &[("task.toml", config)]);
        changes(&path);
        folders.push(path);
    };
    for config in CONFIGS.iter().copied().chain(MISTAKES.iter().map(|(config, _)| *config)) {
        folder(config, &|_| {});
    }
    let remove =
        |name: &'static str| move |path: &Path| std::fs::remove_file(path.join(name)).unwrap();
    folder("", &remove("instruction.md"));
    folder("", &remove("tests/test.sh"));
    folder("", &remove("task.toml"));
    folder("", &remove("solution/solve.sh"));
    folder("[[steps]]\nname = \"one\"", &remove("instruction.md"));
    folder("[[steps]]\nname = \"one\"", &remove("steps/one/instruction.md"));
    folder("[[steps]]\nname = \"one\"", &remove("tests/test.sh"));
    let link = |target: &'static str, name: &'static str| {
        move |path: &Path| std::os::unix::fs::symlink(target, path.join(name)).unwrap()
    };
    folder("", &link("/etc/passwd", "tests/outside"));
    folder("", &link("../../task-000/tests/test.sh", "tests/sibling"));
    folder("", &link("test.sh", "tests/inside"));
    folder("", &link("../tests", "tests/cycle"));
    folder("", &link("/etc", "solution/outside"));
    folder("", &|path| write(path, &[("tests/.harborignore", "test.sh\n")]));
    folder("", &|path| write(path, &[("tests/.harborignore", "*.log\n"), ("tests/a.log", "x")]));
    folder("[verifier.environment]", &|path| {
        std::fs::remove_file(path.join("tests/test.sh")).unwrap();
        write(path, &[("tests/Dockerfile", "FROM scratch\n")]);
    });
    folders
}

#[test]
fn task_folders_are_accepted_exactly_if_harbor_accepts_them() {
    let Some(harbor) = std::env::var_os("ORCHESTRATE_HARBOR").map(PathBuf::from) else {
        skip::skip("harbor", "ORCHESTRATE_HARBOR names no virtual environment");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let folders = folders(dir.path());
    let output = Command::new(harbor.join("bin/python"))
        .args(["-c", ORACLE])
        .args(&folders)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let verdicts: Vec<&str> = text.lines().collect();
    assert_eq!(verdicts.len(), folders.len());
    let (mut differing, mut unsupported) = (Vec::new(), 0);
    for (at, folder) in folders.iter().enumerate() {
        let found = read_task(Utf8Path::from_path(folder).unwrap());
        unsupported += usize::from(matches!(found, Err(HarborProblem::Unsupported(_))));
        let is_accepted = !matches!(found, Err(HarborProblem::Invalid(_)));
        if is_accepted != verdicts[at].starts_with('1') {
            let mistakes = MISTAKES.iter().map(|(config, _)| config);
            let config = CONFIGS.iter().chain(mistakes).nth(at).unwrap_or(&"(files)");
            differing.push(format!(
                "{at} {config:?}: here {:?}, harbor {}",
                found.err(),
                verdicts[at]
            ));
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
    orchestrate_e2e::say(&format!("{} folders, {unsupported} not supported", folders.len()));
}

#[test]
fn what_harbor_accepts_but_no_author_means_is_refused_with_file_and_key() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let read = |folder: &Path| read_task(Utf8Path::from_path(folder).unwrap());
    let folders = folders(root);
    for (folder, (config, parts)) in folders.iter().skip(CONFIGS.len()).zip(MISTAKES) {
        let problem = read(folder).unwrap_err();
        assert!(!matches!(problem, HarborProblem::Invalid(_)), "{config}: {problem}");
        let problem = problem.to_string();
        assert!(parts.iter().all(|part| problem.contains(part)), "{config}: {problem}");
    }
    let task = &folders[0];
    read(task).unwrap();
    for text in ["", " \n\n", "<!-- harbor-canary GUID 1 -->\n"] {
        write(task, &[("instruction.md", text)]);
        let problem = read(task).unwrap_err().to_string();
        assert_eq!(problem, "instruction.md is empty", "{text:?}");
    }
    let step = folders.iter().find(|folder| read(folder).is_ok_and(|row| row.strategy.is_some()));
    write(step.unwrap(), &[("steps/one/instruction.md", "\n")]);
    assert_eq!(read(step.unwrap()).unwrap_err().to_string(), "steps/one/instruction.md is empty");
}
