//! Records of verdicts: what a kept verdict was made of, so that it is used again for nothing else.
//!
//! The invariant: a record is the last file of a verdict's folder to be written, and the first to be
//! removed. It names the digest of the report that it belongs to, so that a report which is
//! incomplete, or which another program wrote, is not taken for the verdict.

use super::logs::{self, REPORT_FILE};
use crate::reward::RewardCompat;
use camino::Utf8Path;
use fs_err as fs;
use orchestrate_sandbox::{ImageIdentity, SandboxLimits};
use orchestrate_tasks::swe::Harness;
use orchestrate_tasks::{Origin, Task};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io;

/// Name of the record in a verdict's folder. The harness neither writes nor reads it.
const RECORD_FILE: &str = "verdict.json";

/// What a verdict depends on, besides the image that its name stands for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GradingInputs {
    /// Digest of the patch.
    patch: String,
    /// Digest of the task: its row, the name of its image, its tests and their time limit.
    task: String,
    /// The rules that apply to the task's family.
    rules: String,
    /// Limits of the grader's sandbox.
    limits: String,
    /// Version of this program.
    program: String,
}

impl GradingInputs {
    /// The inputs of grading `patch` by the rules of `harness` or of `compat`, whichever the task's
    /// family follows.
    ///
    /// # Errors
    /// Never in practice: every task can be serialised.
    pub fn new(
        task: &Task,
        patch: &str,
        harness: Harness,
        compat: RewardCompat,
        limits: SandboxLimits,
    ) -> serde_json::Result<Self> {
        let rules = match (&task.origin, compat) {
            (Origin::SweBench(_), _) => format!("harness {}", harness.version()),
            (_, RewardCompat::Strict) => "reward.compat strict".to_owned(),
            (_, RewardCompat::R2e) => "reward.compat r2e".to_owned(),
        };
        let SandboxLimits { memory, cpu_millis, pids, tmpfs } = limits;
        Ok(Self {
            patch: digest(patch.as_bytes()),
            task: digest(&serde_json::to_vec(task)?),
            rules,
            limits: format!("memory {memory}, cpu_millis {cpu_millis}, pids {pids}, tmpfs {tmpfs}"),
            program: env!("CARGO_PKG_VERSION").to_owned(),
        })
    }

    /// What differs between inputs that were recorded and these, for a message.
    fn differences(&self, now: &Self) -> Vec<String> {
        let mut found = Vec::new();
        for (what, then, now) in
            [("the patch", &self.patch, &now.patch), ("the task's row", &self.task, &now.task)]
        {
            if then != now {
                found.push(format!("{what} has changed"));
            }
        }
        for (what, then, now) in [
            ("rules", &self.rules, &now.rules),
            ("limits of the sandbox", &self.limits, &now.limits),
            ("version of this program", &self.program, &now.program),
        ] {
            if then != now {
                found.push(format!("{what}: {then} then, {now} now"));
            }
        }
        found
    }
}

/// The record of one verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct VerdictRecord {
    inputs: GradingInputs,
    /// The image that was graded in; `None` if its identity is not known.
    image: Option<ImageIdentity>,
    /// Digest of the report.
    report: String,
}

/// What a folder has to say about a verdict for given inputs.
#[derive(Debug, Clone, PartialEq)]
pub enum KnownVerdict {
    /// The report of a verdict with these very inputs.
    Same {
        /// The content of `report.json`.
        report: Value,
        /// The image that was graded in.
        image: Option<ImageIdentity>,
    },
    /// There is a verdict, but not one for these inputs; the reason.
    Other(String),
    /// There is no verdict.
    None,
}

/// Looks in `folder` for a verdict with these inputs.
pub fn known_verdict(folder: &Utf8Path, inputs: &GradingInputs) -> KnownVerdict {
    let other = |reason: &str| KnownVerdict::Other(reason.to_owned());
    let report = match fs::read(folder.join(REPORT_FILE)) {
        Ok(report) => report,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return KnownVerdict::None,
        Err(error) => return other(&error.to_string()),
    };
    let Ok(record) = fs::read(folder.join(RECORD_FILE)) else {
        return other("its inputs are not recorded");
    };
    let Ok(record) = serde_json::from_slice::<VerdictRecord>(&record) else {
        return other("the record of its inputs cannot be read");
    };
    let differences = record.inputs.differences(inputs);
    if !differences.is_empty() {
        return KnownVerdict::Other(differences.join("; "));
    }
    match serde_json::from_slice(&report) {
        Ok(content) if digest(&report) == record.report => {
            KnownVerdict::Same { report: content, image: record.image }
        }
        _ => other("its report.json has changed since"),
    }
}

/// Records what the report in `folder`, if there is one, was made of.
///
/// # Errors
/// If a file cannot be read or written.
pub fn record_verdict(
    folder: &Utf8Path,
    inputs: &GradingInputs,
    image: Option<ImageIdentity>,
) -> io::Result<()> {
    let report = match fs::read(folder.join(REPORT_FILE)) {
        Ok(report) => digest(&report),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let record = VerdictRecord { inputs: inputs.clone(), image, report };
    logs::replace_file(
        &folder.join(RECORD_FILE),
        &serde_json::to_vec_pretty(&record)?,
        logs::READABLE,
    )
}

/// Removes the verdict in `folder`, so that it never stands next to the files of another one.
///
/// # Errors
/// If a file cannot be removed.
pub fn remove_verdict(folder: &Utf8Path) -> io::Result<()> {
    for name in [RECORD_FILE, REPORT_FILE] {
        match fs::remove_file(folder.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

fn digest(bytes: &[u8]) -> String {
    format!("blake3:{}", blake3::hash(bytes).to_hex())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grading::{GradeLogs, GradedChange, write_log_folder};
    use camino::Utf8PathBuf;
    use orchestrate_tasks::Verdict;
    use orchestrate_tasks::micro::{MicroCounts, generate};
    use orchestrate_types::{ByteSize, GradingRun};
    use std::time::Duration;

    const LIMITS: SandboxLimits = SandboxLimits {
        memory: ByteSize::mib(512),
        cpu_millis: 1000,
        pids: 64,
        tmpfs: ByteSize::mib(64),
    };

    struct World {
        _temporary: tempfile::TempDir,
        logs: GradeLogs,
        task: Task,
    }

    impl World {
        fn new() -> Self {
            let temporary = tempfile::tempdir().unwrap();
            let root = Utf8PathBuf::from_path_buf(temporary.path().to_owned()).unwrap();
            let counts = MicroCounts { train: 1, held_out: 0, held_out_families: 0 };
            let logs = GradeLogs { root, model: "org/model".parse().unwrap() };
            Self { _temporary: temporary, logs, task: generate(1, counts).remove(0) }
        }

        fn folder(&self) -> Utf8PathBuf {
            self.logs.folder(&GradingRun::made_of("run"), &self.task)
        }

        fn inputs(&self, patch: &str) -> GradingInputs {
            inputs(&self.task, patch)
        }

        /// Writes what grading `patch` leaves, up to the record.
        fn write(&self, patch: &str, reward: f64) -> io::Result<()> {
            let graded = GradedChange {
                verdict: Verdict {
                    reward,
                    official_reward: reward,
                    statuses: std::collections::BTreeMap::new(),
                    differing: Vec::new(),
                    report: None,
                    suspicious: Vec::new(),
                },
                patch: patch.to_owned(),
                log: b"log".to_vec(),
                apply_log: String::new(),
                eval_script: None,
                problem: None,
                test_time: Duration::from_secs(1),
            };
            write_log_folder(&self.logs, &GradingRun::made_of("run"), &self.task, &graded).map(drop)
        }

        fn grade(&self, patch: &str, reward: f64) {
            self.write(patch, reward).unwrap();
            record_verdict(&self.folder(), &self.inputs(patch), Some(image())).unwrap();
        }

        /// The reward of the known verdict; the reason why there is none.
        fn known(&self, inputs: &GradingInputs) -> Result<f64, String> {
            match known_verdict(&self.folder(), inputs) {
                KnownVerdict::Same { report, image: found } => {
                    assert_eq!(found, Some(image()));
                    Ok(report.get("reward").and_then(Value::as_f64).unwrap())
                }
                KnownVerdict::Other(reason) => Err(reason),
                KnownVerdict::None => Err("none".to_owned()),
            }
        }
    }

    fn image() -> ImageIdentity {
        ImageIdentity { id: "sha256:1".to_owned(), digest: None }
    }

    fn inputs(task: &Task, patch: &str) -> GradingInputs {
        let (harness, compat) = (Harness::V4_1_0, RewardCompat::Strict);
        GradingInputs::new(task, patch, harness, compat, LIMITS).unwrap()
    }

    #[test]
    fn a_verdict_is_used_again_only_for_the_same_inputs() {
        let world = World::new();
        assert_eq!(world.known(&world.inputs("1")), Err("none".to_owned()));
        world.grade("1", 1.0);
        assert_eq!(world.known(&world.inputs("1")), Ok(1.0));

        let same = world.task.clone();
        let mut tests = same.clone();
        tests.expected.clear();
        let mut image = same.clone();
        image.image.push_str("-2");
        let slow = Task { test_timeout: same.test_timeout * 2, ..same.clone() };
        let swe = Task { origin: Origin::SweBench(Box::default()), ..same.clone() };
        let (v4, strict) = (Harness::V4_1_0, RewardCompat::Strict);
        let roomy = SandboxLimits { memory: ByteSize::mib(8192), ..LIMITS };
        for (task, patch, harness, compat, limits, reason) in [
            (&same, "2", v4, strict, LIMITS, "the patch has changed"),
            (&same, "1\n", v4, strict, LIMITS, "the patch has changed"),
            (&tests, "1", v4, strict, LIMITS, "the task's row has changed"),
            (&image, "1", v4, strict, LIMITS, "the task's row has changed"),
            (&slow, "1", v4, strict, LIMITS, "the task's row has changed"),
            (
                &same,
                "1",
                v4,
                RewardCompat::R2e,
                LIMITS,
                "compat strict then, reward.compat r2e now",
            ),
            (&swe, "1", Harness::V5_0_2, strict, LIMITS, "harness 5.0.2 now"),
            (&same, "1", v4, strict, roomy, "memory 512 MiB"),
        ] {
            let other = GradingInputs::new(task, patch, harness, compat, limits).unwrap();
            let found = world.known(&other).unwrap_err();
            assert!(found.contains(reason), "{found}");
        }
        // A version of SWE-bench's harness changes nothing for other families.
        let other = GradingInputs::new(&same, "1", Harness::V5_0_2, strict, LIMITS).unwrap();
        assert_eq!(world.known(&other), Ok(1.0));
    }

    #[test]
    fn an_interrupted_or_failed_write_leaves_no_verdict_for_another_patch() {
        let world = World::new();
        world.grade("1", 1.0);
        let folder = world.folder();
        let files = || -> Vec<(Utf8PathBuf, Vec<u8>)> {
            let names = ["patch.diff", REPORT_FILE, RECORD_FILE];
            names.map(|name| (folder.join(name), fs::read(folder.join(name)).unwrap())).into()
        };
        let of_first = files();
        // The write of the log fails, as on a full disk.
        fs::remove_file(folder.join("test_output.txt")).unwrap();
        fs::create_dir(folder.join("test_output.txt")).unwrap();
        world.write("2", 0.0).unwrap_err();
        assert_eq!(fs::read_to_string(folder.join("patch.diff")).unwrap(), "2");
        for patch in ["1", "2"] {
            assert_eq!(world.known(&world.inputs(patch)), Err("none".to_owned()));
        }
        fs::remove_dir(folder.join("test_output.txt")).unwrap();

        // A kill before the record is written leaves a report of which nothing is known.
        world.write("2", 0.0).unwrap();
        let found = world.known(&world.inputs("2")).unwrap_err();
        assert!(found.contains("not recorded"), "{found}");
        world.grade("2", 0.0);
        assert_eq!(world.known(&world.inputs("2")), Ok(0.0));

        // Whichever of the three files another program or a backup brings back, the verdict on one
        // patch is never taken for that on the other.
        let of_second = files();
        for mix in 0..8_u8 {
            for (at, (first, second)) in of_first.iter().zip(&of_second).enumerate() {
                let (path, content) = if mix >> at & 1 == 0 { first } else { second };
                fs::write(path, content).unwrap();
            }
            assert_ne!(world.known(&world.inputs("1")), Ok(0.0), "{mix}");
            assert_ne!(world.known(&world.inputs("2")), Ok(1.0), "{mix}");
        }
    }

    #[test]
    fn damaged_reports_and_records_are_no_verdicts() {
        let world = World::new();
        world.grade("1", 1.0);
        let folder = world.folder();
        for name in [REPORT_FILE, RECORD_FILE] {
            let whole = fs::read(folder.join(name)).unwrap();
            for length in 0..whole.len() {
                fs::write(folder.join(name), whole.get(..length).unwrap()).unwrap();
                let found = world.known(&world.inputs("1")).unwrap_err();
                assert!(
                    found.contains("has changed") || found.contains("cannot be read"),
                    "{found}"
                );
            }
            fs::write(folder.join(name), whole).unwrap();
        }
        assert_eq!(world.known(&world.inputs("1")), Ok(1.0));
        let changed = fs::read_to_string(folder.join(REPORT_FILE)).unwrap().replace("1.0", "0.0");
        fs::write(folder.join(REPORT_FILE), changed).unwrap();
        let found = world.known(&world.inputs("1")).unwrap_err();
        assert!(found.contains("has changed since"), "{found}");
    }

    #[test]
    fn files_of_an_earlier_grading_do_not_stay() {
        let world = World::new();
        world.grade("1", 1.0);
        let folder = world.folder();
        assert!(folder.join("test_output.txt").exists());
        let graded = GradedChange {
            verdict: Verdict {
                reward: 0.0,
                official_reward: 0.0,
                statuses: std::collections::BTreeMap::new(),
                differing: Vec::new(),
                report: None,
                suspicious: Vec::new(),
            },
            patch: "2".to_owned(),
            log: Vec::new(),
            apply_log: String::new(),
            eval_script: None,
            problem: Some("not applied".to_owned()),
            test_time: Duration::ZERO,
        };
        let task = Task { origin: Origin::SweBench(Box::default()), ..world.task.clone() };
        write_log_folder(&world.logs, &GradingRun::made_of("run"), &task, &graded).unwrap();
        for name in ["test_output.txt", REPORT_FILE, RECORD_FILE] {
            assert!(!folder.join(name).exists(), "{name}");
        }
    }
}
