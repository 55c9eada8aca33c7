//! Task folders and folders of task folders.

use super::config::{self, Config, Environment};
use super::files::TaskFolder;
use super::row::{
    Artifact, HarborFile, HarborImage, HarborRow, HarborStep, HarborVerifier, RewardStrategy,
};
use super::value::HarborProblem;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_types::TaskId;
use std::collections::BTreeMap;

/// Folder whose contents a separate verifier receives by convention.
const PUBLISHED: &str = "/logs/artifacts";
/// Name prefix of images that are built from a task's build context.
const BUILT: &str = "orchestrate/harbor";
/// Number of hex digits of a context's digest in the tag of its image.
const TAG_DIGITS: usize = 20;

/// The task folders in `path`: itself if it has a `task.toml`, else its folders that have one,
/// sorted.
///
/// # Errors
/// If the folder cannot be read.
pub fn task_folders(path: &Utf8Path) -> std::io::Result<Vec<Utf8PathBuf>> {
    let is_task = |folder: &Utf8Path| folder.join("task.toml").is_file();
    if is_task(path) {
        return Ok(vec![path.to_owned()]);
    }
    let mut folders = Vec::new();
    for entry in path.read_dir_utf8()? {
        let entry = entry?;
        if is_task(entry.path()) {
            folders.push(entry.into_path());
        }
    }
    folders.sort();
    Ok(folders)
}

/// Reads one task folder by Harbor's rules. If the task takes its working directory from its image,
/// the row's is `None` until [`HarborImage::complete`] is called.
///
/// # Errors
/// [`HarborProblem::Invalid`] if Harbor refuses the task, [`HarborProblem::Unsupported`] if it
/// cannot run here.
pub fn read_task(path: &Utf8Path) -> Result<HarborRow, HarborProblem> {
    let mut folder = TaskFolder::open(path)?;
    let text =
        folder.text("task.toml")?.ok_or_else(|| HarborProblem::invalid("task.toml is missing"))?;
    let config = Config::parse(&text)?;
    let mut reader = Reader { folder: &mut folder, config: &config };
    let row = reader.row()?;
    match config.unsupported.as_slice() {
        [] => Ok(row),
        all => Err(HarborProblem::unsupported(all.join(", "))),
    }
}

struct Reader<'a> {
    folder: &'a mut TaskFolder,
    config: &'a Config,
}

impl Reader<'_> {
    fn row(&mut self) -> Result<HarborRow, HarborProblem> {
        let config = self.config;
        let environment = &config.environment;
        let steps = if config.steps.is_empty() {
            vec![self.only_step()?]
        } else {
            config.steps.iter().map(|step| self.step(step)).collect::<Result<_, _>>()?
        };
        let folder_name = self.folder.root().file_name().unwrap_or("task");
        let name = config.package.clone().unwrap_or_else(|| folder_name.to_owned());
        let strategy =
            (!config.steps.is_empty()).then(|| config.strategy.unwrap_or(RewardStrategy::Mean));
        Ok(HarborRow {
            id: String::from(TaskId::made_of(&name.replace('/', "__"))),
            name,
            schema_version: config.schema_version.clone(),
            category: config.category.clone().unwrap_or_default(),
            image: self.agent_image(environment)?,
            healthcheck: environment.healthcheck.clone(),
            network: config.agent.network.clone().unwrap_or_else(|| environment.network.clone()),
            cpus: environment.cpus,
            memory_mb: environment.memory_mb,
            solution_env: config.solution_env.clone(),
            steps,
            strategy,
        })
    }

    /// The agent's image, from the folder `environment/` and the section `environment`.
    fn agent_image(&mut self, environment: &Environment) -> Result<HarborImage, HarborProblem> {
        let docker_image = self.config.environment.docker_image.clone();
        let exists = |name: &str| self.folder.path("environment").join(name).exists();
        if exists("docker-compose.yaml") {
            return Err(HarborProblem::unsupported("environment/docker-compose.yaml"));
        }
        let has_dockerfile = exists("Dockerfile");
        match docker_image {
            Some(name) => {
                let uploads = if has_dockerfile {
                    Vec::new()
                } else {
                    self.folder.tree("environment", false)?
                };
                Ok(image(name, None, uploads, environment))
            }
            None if has_dockerfile => self.built("environment", environment),
            None => Err(HarborProblem::invalid(
                "there is neither environment/Dockerfile nor environment.docker_image",
            )),
        }
    }

    /// An image that is built from the folder `relative`.
    fn built(
        &mut self,
        relative: &str,
        environment: &Environment,
    ) -> Result<HarborImage, HarborProblem> {
        if self.folder.path(relative).join(".dockerignore").exists() {
            return Err(HarborProblem::unsupported(format!("{relative}/.dockerignore")));
        }
        let context = self.folder.tree(relative, false)?;
        let name = format!("{BUILT}:{}", digest(&context));
        Ok(image(name, Some(context), Vec::new(), environment))
    }

    fn only_step(&mut self) -> Result<HarborStep, HarborProblem> {
        let config = self.config;
        let instruction = self.instruction("instruction.md")?;
        self.refuse_trajectory("trajectory.json")?;
        let (verifier, tests) = self.verifier(None, &["tests"])?;
        Ok(HarborStep {
            name: String::new(),
            instruction,
            agent_timeout_s: config.agent.timeout_s,
            files: Vec::new(),
            healthcheck: None,
            tests,
            solution: self.solution("solution", false)?,
            verifier,
            min_reward: BTreeMap::new(),
        })
    }

    fn step(&mut self, step: &config::Step) -> Result<HarborStep, HarborProblem> {
        let at = |rest: &str| format!("steps/{}/{rest}", step.name);
        let instruction = self.instruction(&at("instruction.md"))?;
        self.refuse_trajectory(&at("trajectory.json"))?;
        let (verifier, tests) = self.verifier(Some(step), &["tests", &at("tests")])?;
        let has_own_solution = self.folder.path(&at("solution")).exists();
        let solution = if has_own_solution {
            self.solution(&at("solution"), true)?
        } else {
            self.solution("solution", false)?
        };
        Ok(HarborStep {
            name: step.name.clone(),
            instruction,
            agent_timeout_s: step.agent.timeout_s.or(self.config.agent.timeout_s),
            files: self.folder.tree(&at("workdir"), false)?,
            healthcheck: step.healthcheck.clone(),
            tests,
            solution,
            verifier,
            min_reward: step.min_reward.clone(),
        })
    }

    fn instruction(&mut self, relative: &str) -> Result<String, HarborProblem> {
        let text = self.folder.text(relative)?;
        let text = text.ok_or_else(|| HarborProblem::invalid(format!("{relative} is missing")))?;
        // Python reads text files with universal newlines.
        let text = without_canary(&text.replace("\r\n", "\n").replace('\r', "\n"));
        if text.trim().is_empty() {
            return Err(HarborProblem::Mistake(format!("{relative} is empty")));
        }
        Ok(text)
    }

    fn refuse_trajectory(&self, relative: &str) -> Result<(), HarborProblem> {
        if self.folder.path(relative).exists() {
            return Err(HarborProblem::unsupported(format!(
                "{relative} (context of earlier turns)"
            )));
        }
        Ok(())
    }

    fn solution(
        &mut self,
        relative: &str,
        is_required: bool,
    ) -> Result<Vec<HarborFile>, HarborProblem> {
        let files = self.folder.tree(relative, true)?;
        let has_script = files.iter().any(|file| file.path == "solve.sh");
        if has_script {
            return Ok(files);
        }
        if is_required {
            return Err(HarborProblem::unsupported(format!("{relative} without solve.sh")));
        }
        Ok(Vec::new())
    }

    /// How a step is graded, and the tests that are uploaded for it.
    fn verifier(
        &mut self,
        step: Option<&config::Step>,
        folders: &[&str],
    ) -> Result<(HarborVerifier, Vec<HarborFile>), HarborProblem> {
        let task = &self.config.verifier;
        let own = step.map(|step| &step.verifier);
        let is_separate = own.and_then(config::Verifier::mode).or(task.mode()).unwrap_or(false);
        let mut bundled = None;
        if is_separate {
            bundled = self.bundled_image(step)?;
        }
        let effective = own
            .and_then(|verifier| verifier.environment.as_ref())
            .or(task.environment.as_ref())
            .unwrap_or(&self.config.environment);
        let has_bundled_tests = bundled.is_some();
        let separate = match bundled {
            Some(image) => Some(image),
            None if is_separate => Some(self.agent_image(effective)?),
            None => None,
        };
        let mut tests: Vec<HarborFile> = Vec::new();
        if !has_bundled_tests {
            for folder in folders {
                for file in self.folder.tree(folder, true)? {
                    tests.retain(|other| other.path != file.path);
                    tests.push(file);
                }
            }
            tests.retain(|file| !file.is_folder());
            tests.sort_by(|a, b| a.path.cmp(&b.path));
            if !tests.iter().any(|file| file.path == "test.sh") {
                let places = folders.join(" or ");
                return Err(HarborProblem::invalid(format!("{places} has no test.sh")));
            }
        }
        let mut artifacts = self.config.artifacts.clone();
        artifacts.extend(step.iter().flat_map(|step| step.artifacts.iter().cloned()));
        if !artifacts.iter().any(|artifact| artifact.source.trim_end_matches('/') == PUBLISHED) {
            artifacts.insert(0, Artifact { source: PUBLISHED.to_owned(), exclude: Vec::new() });
        }
        if is_separate && artifacts.iter().any(|artifact| !artifact.source.starts_with('/')) {
            return Err(HarborProblem::unsupported("artifacts with relative paths"));
        }
        let baseline = if is_separate { effective } else { &self.config.environment };
        let network = own.and_then(|verifier| verifier.network.clone());
        let network = network.or(task.network.clone()).unwrap_or(baseline.network.clone());
        let mut env = task.env.clone();
        env.extend(own.iter().flat_map(|verifier| verifier.env.clone()));
        let mut collect = task.collect.clone();
        collect.extend(own.iter().flat_map(|verifier| verifier.collect.iter().cloned()));
        let verifier = HarborVerifier {
            timeout_s: own.map_or(task.timeout_s, |verifier| verifier.timeout_s),
            env,
            separate,
            has_bundled_tests,
            collect,
            artifacts,
            network,
        };
        Ok((verifier, tests))
    }

    /// The image of a separate verifier that brings its tests.
    fn bundled_image(
        &mut self,
        step: Option<&config::Step>,
    ) -> Result<Option<HarborImage>, HarborProblem> {
        let effective = step.and_then(|step| step.verifier.environment.as_ref());
        let effective = effective.or(self.config.verifier.environment.as_ref());
        let settings = effective.unwrap_or(&self.config.environment).clone();
        let of_step = step
            .map(|step| (step.verifier.environment.as_ref(), format!("steps/{}/tests", step.name)));
        let of_task = (self.config.verifier.environment.as_ref(), "tests".to_owned());
        for (environment, folder) in of_step.into_iter().chain([of_task]) {
            if let Some(name) = environment.and_then(|env| env.docker_image.clone()) {
                return Ok(Some(image(name, None, Vec::new(), &settings)));
            }
            let has = |name: &str| self.folder.path(&folder).join(name).is_file();
            if has("docker-compose.yaml") {
                return Err(HarborProblem::unsupported(format!("{folder}/docker-compose.yaml")));
            }
            if has("Dockerfile") {
                return self.built(&folder, &settings).map(Some);
            }
        }
        Ok(None)
    }
}

fn image(
    name: String,
    context: Option<Vec<HarborFile>>,
    uploads: Vec<HarborFile>,
    environment: &Environment,
) -> HarborImage {
    HarborImage {
        name,
        context,
        build_timeout_s: environment.build_timeout_s,
        workdir: environment.workdir.clone(),
        uploads,
        env: environment.env.clone(),
    }
}

/// Digest of a build context, which identifies the image built from it.
fn digest(context: &[HarborFile]) -> String {
    let mut hasher = blake3::Hasher::new();
    for file in context {
        hasher.update(&file.mode.to_le_bytes());
        for part in [file.path.as_bytes(), &file.content] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    hasher.finalize().to_hex().chars().take(TAG_DIGITS).collect()
}

/// The text without the canary lines at its start, by which it can be found in training data.
fn without_canary(text: &str) -> String {
    let is_canary = |line: &str| {
        let line = line.trim();
        let is_comment =
            line.starts_with("<!--") && line.ends_with("-->") && line.len() >= "<!---->".len();
        (is_comment || line.starts_with('#')) && line.to_lowercase().contains("canary")
    };
    let lines = text.split('\n').skip_while(|line| is_canary(line));
    let lines: Vec<&str> = lines.skip_while(|line| line.trim().is_empty()).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::without_canary;

    #[test]
    fn canary_lines_at_the_start_are_removed() {
        let text = "<!-- harbor-canary GUID 1 -->\n# Canary\n\nDo it.\n# canary\n";
        assert_eq!(without_canary(text), "Do it.\n# canary\n");
        assert_eq!(without_canary("\n\nDo it."), "Do it.");
        assert_eq!(without_canary("# Title\nText"), "# Title\nText");
    }
}
