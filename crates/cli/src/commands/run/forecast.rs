//! `orchestrate run --dry-run`: upper bounds of what a run needs, from its settings alone.

use crate::args::ConfigSource;
use crate::config::{self, Settings};
use crate::{output, tables, task_source};
use orchestrate_engine::EngineKind;
use orchestrate_moe::ModelConfig;
use orchestrate_rollout::Scaffold;
use orchestrate_sandbox::images_on_hosts;
use orchestrate_tasks::load::LoadError;
use orchestrate_types::ModelShape;
use serde::Serialize;
use std::collections::{BTreeSet, HashSet};
use std::process::ExitCode;

/// Bytes of a token besides its routing row: id, mask, log-prob, version, validity.
const TOKEN_BYTES: u64 = 4 + 1 + 4 + 8 + 1;

/// Upper bounds of a run, not counting retried attempts. A step trains on `rollout.groups_per_step`
/// groups; because groups without a gradient are replaced, it samples up to
/// `rollout.max_groups_per_step`.
#[derive(Debug, Serialize)]
struct Forecast {
    steps: u64,
    /// Episodes that a step trains on.
    episodes_per_step: u64,
    /// Maximum number of episodes that a step samples.
    most_episodes_per_step: u64,
    /// Maximum number of episodes that all steps sample.
    training_episodes: u64,
    evaluations: u64,
    evaluation_episodes: u64,
    /// Tokens of a step's batch if every episode is as long as it may be.
    batch_tokens: u64,
    training_tokens: u64,
    /// Bytes of the routing rows that a step receives; absent without the model's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    mask_wire_bytes_per_step: Option<u64>,
    /// Bytes of a step's batch on disk; absent without the model's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    batch_disk_bytes: Option<u64>,
    /// Distinct images of the tasks; absent if the hub with the task file does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    images: Option<u64>,
    /// Images that no host has; absent if a host does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    image_pulls: Option<u64>,
    containers: u64,
    container_memory_bytes: u64,
    /// Upper bounds for each Docker host.
    docker_hosts: Vec<HostForecast>,
    /// Values that could not be determined, and why.
    notes: Vec<String>,
}

/// Upper bounds for one Docker host.
#[derive(Debug, Serialize)]
struct HostForecast {
    host: String,
    max_containers: u64,
    memory_bytes: u64,
    /// Task images that the host has; absent if it does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    images: Option<u64>,
    /// Sum of the sizes of these images, in bytes; a shared layer counts once per image.
    #[serde(skip_serializing_if = "Option::is_none")]
    image_bytes: Option<u64>,
}

/// Runs the command.
pub(super) async fn run(source: &ConfigSource, as_json: bool) -> anyhow::Result<ExitCode> {
    let settings = config::load(source)?.check()?;
    settings.check_training()?;
    let mut notes = Vec::new();
    let shape = match ModelConfig::load(&settings.engine.model) {
        Ok(model) => Some(model.shape()),
        Err(error) => {
            notes.push(format!("sizes of routing rows are unknown: {error}"));
            None
        }
    };
    let mut images = None;
    let tasks = match task_source::task_set(&settings) {
        Ok(set) => {
            let all = set.train.iter().chain(&set.held_out).chain(&set.held_out_families);
            let names: BTreeSet<&str> = all.map(|task| task.image.as_str()).collect();
            let held_out = (set.held_out.len() as u64, set.held_out_families.len() as u64);
            let names = images.insert(names.into_iter().map(ToOwned::to_owned).collect::<Vec<_>>());
            Some((names.len() as u64, held_out))
        }
        // The run itself could not start either, except that the hub may be reachable later.
        Err(error) if !matches!(error.downcast_ref(), Some(LoadError::Hub(_))) => {
            return Err(error);
        }
        Err(error) => {
            notes.push(format!("images are unknown: {error:#}"));
            None
        }
    };
    let mut forecast = forecast(&settings, shape.as_ref(), tasks, notes);
    if settings.rollout.scaffold == Scaffold::External {
        forecast.images = None;
    } else if let Some(images) = images {
        add_images(&images, &settings, &mut forecast).await;
    }
    if as_json {
        output::json(&forecast)?;
        return Ok(ExitCode::SUCCESS);
    }
    show(&forecast);
    Ok(ExitCode::SUCCESS)
}

/// Adds which images the hosts have, and how many must be pulled.
async fn add_images(images: &[String], settings: &Settings, forecast: &mut Forecast) {
    let mut present = HashSet::new();
    let mut all_answer = true;
    let found = images_on_hosts(&settings.sandbox, images).await;
    for (host, found) in forecast.docker_hosts.iter_mut().zip(found) {
        match found {
            Ok(found) => {
                host.images = Some(found.present.len() as u64);
                host.image_bytes = Some(found.bytes);
                present.extend(found.present);
            }
            Err(error) => {
                all_answer = false;
                forecast.notes.push(format!("images on {} are unknown: {error:#}", host.host));
            }
        }
    }
    forecast.image_pulls = all_answer.then(|| (images.len() - present.len()) as u64);
}

fn forecast(
    settings: &Settings,
    shape: Option<&ModelShape>,
    tasks: Option<(u64, (u64, u64))>,
    notes: Vec<String>,
) -> Forecast {
    let (run, rollout) = (&settings.run, &settings.rollout);
    let steps = u64::from(run.steps);
    let episodes = |groups: u32| u64::from(groups) * u64::from(rollout.group_size);
    let evaluations = match u64::from(run.eval_every) {
        0 => 0,
        // Before the first step, at each multiple, and after the last step.
        every => {
            u64::from(run.eval_first) + steps / every + u64::from(!steps.is_multiple_of(every))
        }
    };
    let (held_out, families) = tasks.map_or((u64::MAX, u64::MAX), |(_, parts)| parts);
    let evaluated = u64::from(run.eval_tasks).min(held_out)
        + u64::from(run.eval_held_out_families).min(families);
    let context = shape.map_or(usize::MAX, |shape| shape.context);
    let episode_tokens = rollout.max_sequence_tokens.min(context) as u64;
    let per_step = episodes(rollout.groups_per_step);
    let most_per_step = episodes(rollout.max_groups_per_step);
    let batch_tokens = per_step * episode_tokens;
    let ids = |shape: &ModelShape| match settings.engine.kind {
        // Four bytes per id, for every layer, including those without experts.
        EngineKind::Sglang => (shape.hidden_layers * shape.top_k * 4) as u64,
        EngineKind::Vllm => (shape.hidden_layers * shape.top_k * shape.id_bytes()) as u64,
        // A chat server sends no rows, and a run cannot train with it.
        EngineKind::Openai => 0,
    };
    let row = |shape: &ModelShape| (shape.ids_per_row() * shape.id_bytes()) as u64;
    let in_flight = u64::from(rollout.max_in_flight);
    let of_files = settings.tasks.file.is_some() || settings.tasks.held_out_file.is_some();
    // Containers of repositories are removed after one use; others are kept for the next agent or grader.
    let wanted = if of_files { in_flight } else { 2 * in_flight };
    let sandbox = &settings.sandbox;
    // External episodes have no containers.
    let is_external = rollout.scaffold == Scaffold::External;
    let containers = if is_external { 0 } else { (sandbox.capacity() as u64).min(wanted) };
    let hosts = if is_external { Vec::new() } else { sandbox.docker_hosts() };
    let docker_hosts = hosts.into_iter().map(|host| {
        let max_containers = sandbox.on(&host).max_containers as u64;
        let memory_bytes = max_containers.min(wanted) * sandbox.memory.0;
        let host = host.title().to_owned();
        HostForecast { host, max_containers, memory_bytes, images: None, image_bytes: None }
    });
    Forecast {
        steps,
        episodes_per_step: per_step,
        most_episodes_per_step: most_per_step,
        training_episodes: steps * most_per_step,
        evaluations,
        evaluation_episodes: evaluations * evaluated * u64::from(run.eval_samples),
        batch_tokens,
        training_tokens: steps * batch_tokens,
        // Dropped groups send rows, too. Base64 turns three bytes into four.
        mask_wire_bytes_per_step: shape
            .map(|shape| most_per_step * episode_tokens * ids(shape) / 3 * 4),
        batch_disk_bytes: shape.map(|shape| batch_tokens * (row(shape) + TOKEN_BYTES)),
        images: tasks.map(|(images, _)| images),
        image_pulls: None,
        containers,
        container_memory_bytes: containers * sandbox.memory.0,
        docker_hosts: docker_hosts.collect(),
        notes,
    }
}

/// A number of bytes in the largest unit in which it is at least 1.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    let digits = usize::from(unit > 0);
    format!("{value:.digits$} {}", UNITS.get(unit).unwrap_or(&"B"))
}

fn show(forecast: &Forecast) {
    let mut table = tables::table(&["at most", ""]);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    row("global steps", forecast.steps.to_string());
    row(
        "training episodes",
        format!(
            "{} ({} per step, of which {} are trained on)",
            forecast.training_episodes, forecast.most_episodes_per_step, forecast.episodes_per_step
        ),
    );
    row(
        "evaluation episodes",
        format!(
            "{} ({})",
            forecast.evaluation_episodes,
            output::counted(forecast.evaluations, "evaluation")
        ),
    );
    row(
        "tokens trained on",
        format!("{} ({} per step)", forecast.training_tokens, forecast.batch_tokens),
    );
    if let Some(bytes) = forecast.mask_wire_bytes_per_step {
        row("routing rows received per step", size(bytes));
    }
    if let Some(bytes) = forecast.batch_disk_bytes {
        row("batch on disk per step", size(bytes));
    }
    if let Some(images) = forecast.images {
        let pulls = forecast.image_pulls.map(|pulls| format!(" ({pulls} to pull)"));
        row("images", format!("{images}{}", pulls.unwrap_or_default()));
    }
    for host in &forecast.docker_hosts {
        if let (Some(images), Some(bytes)) = (host.images, host.image_bytes) {
            row(&format!("images on {}", host.host), format!("{images} ({})", size(bytes)));
        }
    }
    row(
        "containers at once",
        format!("{} ({} memory)", forecast.containers, size(forecast.container_memory_bytes)),
    );
    if forecast.docker_hosts.len() > 1 {
        for host in &forecast.docker_hosts {
            let memory = size(host.memory_bytes);
            row(
                &format!("containers on {}", host.host),
                format!("{} ({memory} memory)", host.max_containers),
            );
        }
    }
    output::data(table);
    for note in &forecast.notes {
        output::say(format!("note: {note}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_sizes_are_not_rounded_to_nothing() {
        let shown = [0, 1023, 1024, 3 << 19, 5 << 30, 1 << 50].map(size);
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB", "1024.0 TiB"]);
    }

    #[test]
    fn bounds_follow_from_settings_and_shape() {
        let text = "[run]\nsteps = 25\neval_every = 10\neval_tasks = 500\neval_samples = 1\n\
            [rollout]\ngroup_size = 8\ngroups_per_step = 4\nmax_sequence_tokens = 1000\n\
            max_in_flight = 3\n[sandbox]\nmax_containers = 16\nmemory = \"1 GiB\"\n\
            [[sandbox.hosts]]\nurl = \"ssh://a\"\nmax_containers = 4\n\
            [[sandbox.hosts]]\nurl = \"ssh://b\"\n";
        let raw = config::parse_layer("test", text).unwrap();
        let settings = raw.check().unwrap();
        let shape = ModelShape {
            hidden_layers: 48,
            moe_layers: (0..48).collect(),
            experts: 128,
            top_k: 8,
            vocab: 10,
            context: 40_960,
        };
        let made = forecast(&settings, Some(&shape), Some((7, (300, 9))), Vec::new());
        assert_eq!((made.episodes_per_step, made.most_episodes_per_step), (32, 128));
        assert_eq!(made.training_episodes, 25 * 128, "dropped groups are replaced");
        assert_eq!((made.evaluations, made.evaluation_episodes), (4, 1200));
        assert_eq!(made.batch_tokens, 32_000);
        assert_eq!(made.mask_wire_bytes_per_step, Some(128_000 * 48 * 8 * 4 / 3 * 4));
        assert_eq!(made.batch_disk_bytes, Some(32_000 * (384 + 18)));
        assert_eq!((made.containers, made.container_memory_bytes), (6, 6 << 30));
        let hosts = made.docker_hosts.iter().map(|host| (host.max_containers, host.memory_bytes));
        assert_eq!(hosts.collect::<Vec<_>>(), [(4, 4 << 30), (16, 6 << 30)]);
    }
}
