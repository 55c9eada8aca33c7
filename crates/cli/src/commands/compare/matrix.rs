//! The runs of a comparison: configs × variants × seeds.

use crate::args::{CompareArgs, Variant};
use crate::config::{self, ConfigError, Sections, Settings};
use crate::output;
use anyhow::Context;
use camino::{Utf8Path, Utf8PathBuf};

/// One run of the comparison.
#[derive(Debug)]
pub(super) struct Cell {
    /// Name of its configuration.
    pub(super) name: String,
    pub(super) seed: u64,
    /// Its settings with every default filled in.
    pub(super) raw: Sections,
    pub(super) folder: Utf8PathBuf,
}

impl Cell {
    /// The checked settings.
    pub(super) fn settings(&self) -> Result<Settings, ConfigError> {
        self.raw.check()
    }
}

/// All runs, seed by seed, so that every configuration has results long before the end.
#[derive(Debug)]
pub(super) struct Matrix {
    pub(super) cells: Vec<Cell>,
}

impl Matrix {
    /// Reads and checks every combination; the folders are below `out`.
    ///
    /// # Errors
    /// Invalid settings, and two configurations with the same name.
    pub(super) fn new(args: &CompareArgs, out: &Utf8Path) -> anyhow::Result<Self> {
        let mut seeds = args.seeds.clone();
        seeds.sort_unstable();
        seeds.dedup();
        let mut cells: Vec<Cell> = Vec::new();
        for file in &args.configs {
            let stem = file.file_stem().unwrap_or("config");
            for (name, sets) in configurations(stem, args) {
                if cells.iter().any(|cell| cell.name == name) {
                    anyhow::bail!(ConfigError::Layer {
                        name: format!("configuration {name:?}"),
                        error: "appears twice; files and variants must have distinct names".into(),
                    });
                }
                for &seed in &seeds {
                    let seed_set = [format!("run.seed={seed}")];
                    let layers = [args.sets.as_slice(), sets, &seed_set];
                    let loaded = config::load_layers(std::slice::from_ref(file), &layers);
                    let loaded = loaded.and_then(|(raw, left_out)| {
                        let raw = raw.with_defaults()?;
                        raw.check()?.check_training()?;
                        Ok((raw, left_out))
                    });
                    let (raw, left_out) =
                        loaded.with_context(|| format!("configuration {name:?}"))?;
                    let raw = raw.with_absolute_paths()?;
                    for problem in left_out.iter().filter(|_| Some(&seed) == seeds.first()) {
                        output::say(format!(
                            "warning: configuration {name:?}: not read: {problem}"
                        ));
                    }
                    let folder = out.join(&name).join(format!("seed-{seed}"));
                    cells.push(Cell { name: name.clone(), seed, raw, folder });
                }
            }
        }
        cells.sort_by_key(|cell| cell.seed);
        Ok(Self { cells })
    }
}

/// Names and settings of the configurations that are made from one file.
fn configurations<'a>(stem: &str, args: &'a CompareArgs) -> Vec<(String, &'a [String])> {
    if args.variants.is_empty() {
        return vec![(stem.to_owned(), &[])];
    }
    let name = |variant: &Variant| match args.configs.len() {
        1 => variant.name.clone(),
        _ => format!("{stem}-{}", variant.name),
    };
    args.variants.iter().map(|variant| (name(variant), variant.sets.as_slice())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: CompareArgs,
    }

    fn matrix(arguments: &[&str]) -> anyhow::Result<Matrix> {
        let line = ["compare", "--out", "out"].iter().chain(arguments);
        Matrix::new(&Line::try_parse_from(line)?.args, Utf8Path::new("/out"))
    }

    #[test]
    fn every_combination_is_one_run() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let (a, b) = (file("a.toml", "[run]\nsteps = 7\n"), file("b.toml", ""));
        let variants = ["--variant", "none:algorithm.routing_replay=none", "--variant", "r3"];
        let mut arguments =
            vec![a.as_str(), b.as_str(), "--seeds", "2,1,2", "--set", "run.steps=3"];
        arguments.extend(variants);
        let found = matrix(&arguments).unwrap().cells;
        let folders: Vec<&str> = found.iter().map(|cell| cell.folder.as_str()).collect();
        let names = ["a-none", "a-r3", "b-none", "b-r3"];
        let expected =
            [1, 2].iter().flat_map(|seed| names.map(|name| format!("/out/{name}/seed-{seed}")));
        assert_eq!(folders, expected.collect::<Vec<_>>());
        for cell in &found {
            let settings = cell.settings().unwrap();
            assert_eq!((settings.run.steps, settings.run.seed), (3, cell.seed));
            assert_eq!(
                settings.algorithm.routing_replay().replays_rollout(),
                cell.name.ends_with("r3")
            );
        }
        // With one file, a variant's name is enough; without variants, the file's.
        assert_eq!(matrix(&[&a, "--seeds", "1", "--variant", "x"]).unwrap().cells[0].name, "x");
        assert_eq!(matrix(&[&a, "--seeds", "1"]).unwrap().cells[0].name, "a");
    }

    #[test]
    fn invalid_settings_name_their_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.toml");
        std::fs::write(&path, "").unwrap();
        let file = path.to_str().unwrap();
        let said = |arguments: &[&str]| format!("{:#}", matrix(arguments).unwrap_err());
        let bad = said(&[file, "--seeds", "1", "--variant", "odd:algorithm.mini_steps=0"]);
        assert!(bad.contains("\"odd\"") && bad.contains("algorithm.mini_steps"), "{bad}");
        let twice = said(&[file, file, "--seeds", "1"]);
        assert!(twice.contains("\"a\"") && twice.contains("twice"), "{twice}");
    }
}
