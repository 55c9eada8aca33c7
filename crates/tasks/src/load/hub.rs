//! Rows in a data set of the Hugging Face hub, fetched through its usual cache.
//!
//! `HF_HOME`, `HF_ENDPOINT` and `HF_TOKEN` mean what they mean elsewhere.

use camino::Utf8PathBuf;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Repo, RepoType};
use std::collections::BTreeMap;

/// How a data set is named, as Hugging Face's own libraries name it.
const SCHEME: &str = "hf://datasets/";
const HINT: &str = "write hf://datasets/OWNER/NAME, with @REVISION or /PATH behind it where needed";
/// Endings of files that hold rows.
const ENDINGS: [&str; 5] = [".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz"];
/// A hub that stumbles is asked so many times more.
const RETRIES: usize = 3;

/// A data set that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The text names no data set.
    #[error("`{0}` names no data set; {HINT}")]
    Name(String),
    /// The hub's client could not be made.
    #[error("cannot open the Hugging Face cache")]
    Client(#[source] ApiError),
    /// The hub does not tell about the data set.
    #[error(
        "the Hugging Face hub does not give the data set {id} at `{revision}`: check both names; a \
         gated one needs HF_TOKEN, another hub HF_ENDPOINT; without a network name local files"
    )]
    Info {
        /// The data set.
        id: String,
        /// Branch, tag or commit.
        revision: String,
        /// What the hub says.
        source: ApiError,
    },
    /// None of its files fits.
    #[error("the data set {id} has no file of rows that fits {wanted}; it has: {found}")]
    NoFile {
        /// The data set.
        id: String,
        /// What was asked for.
        wanted: String,
        /// Its files of rows.
        found: String,
    },
    /// It has several splits.
    #[error(
        "the data set {id} has the splits {splits}: name one, such as \
         {SCHEME}{id}/{example}, with * for any text"
    )]
    Splits {
        /// The data set.
        id: String,
        /// Their names.
        splits: String,
        /// A path of one.
        example: String,
    },
    /// A file does not come.
    #[error("cannot fetch {file} of the data set {id}; what came is kept, so ask again")]
    File {
        /// The data set.
        id: String,
        /// The file.
        file: String,
        /// What went wrong.
        source: ApiError,
    },
    /// The cache lies where paths are not text.
    #[error("the Hugging Face cache has a path that is not UTF-8: {0}; set HF_HOME to another")]
    Path(std::path::PathBuf),
}

/// `hf://datasets/OWNER/NAME[@REVISION][/PATH]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HubSource {
    id: String,
    revision: String,
    /// Files by their path, in which `*` stands for any text.
    path: Option<String>,
}

impl HubSource {
    /// `None` where `text` is a path of this machine.
    pub(super) fn parse(text: &str) -> Option<Result<Self, HubError>> {
        text.starts_with("hf://").then(|| {
            let named = text.strip_prefix(SCHEME).and_then(Self::of_name);
            named.ok_or_else(|| HubError::Name(text.to_owned()))
        })
    }

    fn of_name(name: &str) -> Option<Self> {
        let mut parts = name.splitn(3, '/');
        let (owner, rest, path) = (parts.next()?, parts.next()?, parts.next());
        let (name, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let whole = !owner.is_empty() && !name.is_empty() && !revision.is_empty();
        let path = path.filter(|path| !path.is_empty()).map(ToOwned::to_owned);
        whole.then(|| Self { id: format!("{owner}/{name}"), revision: revision.to_owned(), path })
    }

    /// The same at the commit that its revision is now.
    pub(super) fn pinned(&self) -> Result<String, HubError> {
        let commit = if is_commit(&self.revision) {
            self.revision.clone()
        } else {
            self.listing(&api()?)?.1
        };
        let path = self.path.as_ref().map(|path| format!("/{path}")).unwrap_or_default();
        Ok(format!("{SCHEME}{}@{commit}{path}", self.id))
    }

    /// Its files on this machine, in the order of their names; those not in the cache are fetched.
    pub(super) fn fetch(&self) -> Result<Vec<Utf8PathBuf>, HubError> {
        let api = api()?;
        let (files, commit) = match &self.path {
            // What a commit's file is stays so: it may be here already, and no hub is asked.
            Some(path) if !path.contains('*') && is_commit(&self.revision) => {
                (vec![path.clone()], self.revision.clone())
            }
            _ => {
                let (files, commit) = self.listing(&api)?;
                (self.choose(&files)?, commit)
            }
        };
        let repo = api.repo(Repo::with_revision(self.id.clone(), RepoType::Dataset, commit));
        let fetched = files.iter().map(|file| {
            let path = repo.get(file).map_err(|source| HubError::File {
                id: self.id.clone(),
                file: file.clone(),
                source,
            })?;
            Utf8PathBuf::from_path_buf(path).map_err(HubError::Path)
        });
        fetched.collect()
    }

    /// All files of the data set, and the commit that its revision is.
    fn listing(&self, api: &Api) -> Result<(Vec<String>, String), HubError> {
        let revision = self.revision.clone();
        let repo = Repo::with_revision(self.id.clone(), RepoType::Dataset, revision.clone());
        let info = api.repo(repo).info().map_err(|source| HubError::Info {
            id: self.id.clone(),
            revision,
            source,
        })?;
        Ok((info.siblings.into_iter().map(|file| file.rfilename).collect(), info.sha))
    }

    /// Those of `files` that are asked for: all that fit the path, or the only split there is.
    fn choose(&self, files: &[String]) -> Result<Vec<String>, HubError> {
        let has_rows = |file: &&String| ENDINGS.iter().any(|ending| file.ends_with(ending));
        let mut rows: Vec<String> = files.iter().filter(has_rows).cloned().collect();
        rows.sort();
        let none = |wanted: &str, rows: &[String]| HubError::NoFile {
            id: self.id.clone(),
            wanted: wanted.to_owned(),
            found: if rows.is_empty() { "none".to_owned() } else { rows.join(", ") },
        };
        if let Some(path) = &self.path {
            let fitting: Vec<_> = rows.iter().filter(|file| fits(path, file)).cloned().collect();
            return if fitting.is_empty() { Err(none(path, &rows)) } else { Ok(fitting) };
        }
        let mut splits: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for file in &rows {
            splits.entry(split(file)).or_default().push(file.clone());
        }
        match splits.first_key_value() {
            None => Err(none("*.parquet or *.jsonl", &rows)),
            Some((_, files)) if splits.len() == 1 => Ok(files.clone()),
            Some((_, files)) => Err(HubError::Splits {
                id: self.id.clone(),
                splits: splits.keys().copied().collect::<Vec<_>>().join(", "),
                example: files.first().map(|file| pattern(file)).unwrap_or_default(),
            }),
        }
    }
}

fn api() -> Result<Api, HubError> {
    let mut builder = ApiBuilder::from_env().with_retries(RETRIES);
    if let Ok(token) = std::env::var("HF_TOKEN") {
        builder = builder.with_token(Some(token).filter(|token| !token.trim().is_empty()));
    }
    builder.build().map_err(HubError::Client)
}

/// The split that a file is a part of: `train` of `data/train-00000-of-00003.parquet`.
fn split(file: &str) -> &str {
    let name = file.rsplit('/').next().unwrap_or(file);
    let stem = name.split('.').next().unwrap_or(name);
    match stem.find("-0") {
        Some(end) => stem.get(..end).unwrap_or(stem),
        None => stem,
    }
}

/// A path that fits all files of the same split.
fn pattern(file: &str) -> String {
    match (file.find("-0"), file.rfind('.')) {
        (Some(begin), Some(end)) if begin < end => {
            let part = |text: Option<&str>| text.unwrap_or_default().to_owned();
            format!("{}-*{}", part(file.get(..begin)), part(file.get(end..)))
        }
        _ => file.to_owned(),
    }
}

fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether `file` is what `pattern` says, in which `*` stands for any text.
fn fits(pattern: &str, file: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == file };
    let Some(mut left) = file.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some((_, behind)) = left.split_once(part) else { return false };
        left = behind;
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> HubSource {
        HubSource::parse(text).unwrap().unwrap()
    }

    #[test]
    fn names_are_those_of_hugging_face() {
        let whole = source("hf://datasets/a/b@v1/data/train-*.parquet");
        assert_eq!((whole.id.as_str(), whole.revision.as_str()), ("a/b", "v1"));
        assert_eq!(whole.path.as_deref(), Some("data/train-*.parquet"));
        let plain = source("hf://datasets/a/b");
        assert_eq!((plain.revision.as_str(), plain.path), ("main", None));
        assert!(HubSource::parse("rows.jsonl").is_none());
        for wrong in ["hf://a/b", "hf://datasets/a", "hf://datasets//b", "hf://datasets/a/b@"] {
            let error = HubSource::parse(wrong).unwrap().unwrap_err();
            assert!(error.to_string().contains("OWNER/NAME"), "{wrong}: {error}");
        }
    }

    #[test]
    fn stars_stand_for_any_text() {
        for (pattern, file, is) in [
            ("data/*", "data/x.parquet", true),
            ("*.parquet", "data/x.parquet", true),
            ("d*-0*.p", "data/t-00.p", true),
            ("data/train-*.parquet", "data/test-0.parquet", false),
            ("a*b*b", "ab", false),
            ("a*b", "ab", true),
            ("a", "ab", false),
        ] {
            assert_eq!(fits(pattern, file), is, "{pattern} {file}");
        }
    }

    #[test]
    fn the_only_split_is_taken_and_of_several_one_must_be_named() {
        let files =
            |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let one =
            files(&["README.md", "data/t-1-00001-of-2.parquet", "data/t-1-00000-of-2.parquet"]);
        let chosen = source("hf://datasets/a/b").choose(&one).unwrap();
        assert_eq!(chosen, ["data/t-1-00000-of-2.parquet", "data/t-1-00001-of-2.parquet"]);
        let two = files(&["data/dev-00000-of-1.parquet", "data/test-00000-of-1.parquet"]);
        let error = source("hf://datasets/a/b").choose(&two).unwrap_err().to_string();
        assert!(error.contains("dev, test") && error.contains("a/b/data/dev-*.parquet"), "{error}");
        let chosen = source("hf://datasets/a/b/data/test-*").choose(&two).unwrap();
        assert_eq!(chosen, ["data/test-00000-of-1.parquet"]);
        let error = source("hf://datasets/a/b/x*").choose(&two).unwrap_err().to_string();
        assert!(error.contains("x*") && error.contains("data/dev-0"), "{error}");
    }
}
