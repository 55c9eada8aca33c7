//! `orchestrate tasks export harbor`: writes tasks as Harbor task folders.

use super::{NAME_CHARS, to_verify};
use crate::args::HarborExportArgs;
use crate::error::InputError;
use crate::output;
use fs_err as fs;
use orchestrate_tasks::harbor::{HarborFile, export_task};
use orchestrate_tasks::printable;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use std::os::unix::fs::PermissionsExt as _;
use std::process::ExitCode;

/// Writes each task that can be exported to a folder of its own.
pub(super) fn harbor(args: &HarborExportArgs) -> anyhow::Result<ExitCode> {
    let (settings, mut tasks) = to_verify(&args.selection)?;
    if args.sample > 0 {
        tasks.shuffle(&mut ChaCha8Rng::seed_from_u64(settings.tasks.seed));
        tasks.truncate(args.sample);
    }
    let (mut written, mut refused) = (0_usize, 0_usize);
    for task in &tasks {
        let files = match export_task(task) {
            Ok(files) => files,
            Err(problem) => {
                refused += 1;
                output::say(format!("refused: {}: {problem}", printable(&task.id, NAME_CHARS)));
                continue;
            }
        };
        let folder = args.out.join(task.id.as_str());
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        for HarborFile { path, mode, content } in files {
            let path = folder.join(path);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(&path, content)?;
            fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
        }
        written += 1;
    }
    if written == 0 {
        let file = args.selection.environment.clone().into();
        return Err(InputError::NoUsableRow { file, refused, skipped: 0 }.into());
    }
    if args.selection.json {
        output::json(&json!({"written": written, "refused": refused}))?;
    } else {
        output::data(format!(
            "{}: {} written, {refused} refused",
            args.out,
            output::counted(written, "task")
        ));
    }
    Ok(ExitCode::SUCCESS)
}
