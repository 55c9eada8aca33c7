//! Images of tests, built from recipes in the repository.

use crate::{docker, skip, stderr};
use std::fs;
use std::path::Path;

/// The image that all recipes start from; `scripts/test` builds it.
const BASE: &str = "orchestrate/repository:latest";

/// The image of `NAME.Dockerfile` in a folder, whose files the recipe may copy: built on the first call.
/// `None`, reported as a skip, without Docker or the base image.
///
/// The tag is a digest of base and folder, so that tests of two checkouts on one machine never
/// use each other's images.
///
/// # Errors
/// Fails if the folder cannot be read, or Docker cannot build the image.
pub fn recipe_image(folder: &Path, name: &str) -> anyhow::Result<Option<String>> {
    let base = docker(None, &["image", "inspect", "-f", "{{.Id}}", BASE]);
    let Some(base) = base.ok().filter(|output| output.status.success()) else {
        skip::skip(
            "docker",
            "image orchestrate/repository:latest not found (scripts/test builds it)",
        );
        return Ok(None);
    };
    let mut digest = blake3::Hasher::new();
    digest.update(&base.stdout);
    digest_folder(&mut digest, folder)?;
    let tag = format!("orchestrate/test-{name}:{}", &digest.finalize().to_hex()[..12]);
    if docker(None, &["image", "inspect", &tag])?.status.success() {
        return Ok(Some(tag));
    }
    let recipe = folder.join(format!("{name}.Dockerfile"));
    let folder = folder.to_string_lossy();
    let recipe = recipe.to_string_lossy();
    let built =
        docker(None, &["build", "-q", "--network=none", "-t", &tag, "-f", &recipe, &folder])?;
    anyhow::ensure!(built.status.success(), "docker build of {recipe} failed: {}", stderr(&built));
    Ok(Some(tag))
}

/// Adds names and contents of a folder's files, in the order of their names.
fn digest_folder(digest: &mut blake3::Hasher, folder: &Path) -> anyhow::Result<()> {
    let mut paths = fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<Vec<_>, _>>()?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            digest_folder(digest, &path)?;
            continue;
        }
        let content = fs::read(&path)?;
        digest.update(path.file_name().unwrap_or_default().as_encoded_bytes());
        digest.update(&content.len().to_le_bytes());
        digest.update(&content);
    }
    Ok(())
}
