//! Files of rows in a data set of the Hugging Face hub, fetched through the usual local cache.
//!
//! `HF_HOME`, `HF_ENDPOINT` and `HF_TOKEN` apply as they do to Hugging Face's own libraries.

use super::hub_files::{Ambiguous, missing_shard, only_split, same_part, with_rows};
use camino::Utf8PathBuf;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Repo, RepoType};

/// Prefix of a data set's address, as in Hugging Face's own libraries.
const SCHEME: &str = "hf://datasets/";
/// Number of times that a failed request is repeated.
const RETRIES: usize = 3;

/// A data set that cannot be fetched.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The text is not the address of a data set.
    #[error("`{0}` is not a data set; expected {SCHEME}OWNER/NAME[@REVISION][/PATH]")]
    Name(String),
    /// The hub's client cannot be created.
    #[error("cannot create the client of the Hugging Face hub")]
    Client(#[source] ApiError),
    /// The hub cannot be reached, or does not know the data set or its revision.
    #[error(
        "cannot look up data set {id} at `{revision}` on the Hugging Face hub; check both names, \
         set HF_TOKEN if it is gated or HF_ENDPOINT for another hub, or use local files if offline"
    )]
    Info {
        /// The data set.
        id: String,
        /// Branch, tag or commit.
        revision: String,
        /// The client's error.
        source: ApiError,
    },
    /// No file of the data set matches.
    #[error("data set {id} has no file of rows that matches {wanted}; it has: {found}")]
    NoFile {
        /// The data set.
        id: String,
        /// The path or pattern that was requested.
        wanted: String,
        /// The files of rows that it has, separated by commas.
        found: String,
    },
    /// The data set has several splits or configurations, and the address does not choose one.
    #[error(
        "data set {id} has several {what} ({names}); choose one, for example \
         {SCHEME}{id}/{example} (* matches any text)"
    )]
    Ambiguous {
        /// The data set.
        id: String,
        /// What there are several of.
        what: &'static str,
        /// Their names, separated by commas.
        names: String,
        /// A path that matches the files of one of them.
        example: String,
    },
    /// The path matches files of several splits.
    #[error(
        "`{path}` matches several splits of data set {id} ({names}), which are not mixed; choose \
         one, for example {SCHEME}{id}/{example}"
    )]
    Mixed {
        /// The data set.
        id: String,
        /// The path that was requested.
        path: String,
        /// Their names, separated by commas.
        names: String,
        /// A path that matches the files of one of them.
        example: String,
    },
    /// A shard of the split is missing, so that its rows would be left out.
    #[error(
        "data set {id} at `{revision}` lacks the file {missing}, which the names of the others promise; \
         use another revision"
    )]
    MissingShard {
        /// The data set.
        id: String,
        /// Branch, tag or commit.
        revision: String,
        /// The file.
        missing: String,
    },
    /// A file cannot be downloaded.
    #[error("cannot fetch {file} of data set {id}; what was downloaded is kept, so run again")]
    File {
        /// The data set.
        id: String,
        /// The file.
        file: String,
        /// The client's error.
        source: ApiError,
    },
    /// The path of a cached file is not UTF-8.
    #[error("the path {0} in the Hugging Face cache is not UTF-8; set HF_HOME to another folder")]
    Path(std::path::PathBuf),
}

/// `hf://datasets/OWNER/NAME[@REVISION][/PATH]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HubSource {
    id: String,
    revision: String,
    /// Path of the files, in which `*` matches any text; `None` = the only split.
    path: Option<String>,
}

impl HubSource {
    /// Parses the address of a data set; `None` if `text` is a local path.
    pub(super) fn parse(text: &str) -> Option<Result<Self, HubError>> {
        text.starts_with("hf://").then(|| {
            let named = text.strip_prefix(SCHEME).and_then(Self::parse_name);
            named.ok_or_else(|| HubError::Name(text.to_owned()))
        })
    }

    fn parse_name(name: &str) -> Option<Self> {
        let mut parts = name.splitn(3, '/');
        let (owner, rest, path) = (parts.next()?, parts.next()?, parts.next());
        let (name, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let whole = !owner.is_empty() && !name.is_empty() && !revision.is_empty();
        let path = path.filter(|path| !path.is_empty()).map(ToOwned::to_owned);
        whole.then(|| Self { id: format!("{owner}/{name}"), revision: revision.to_owned(), path })
    }

    /// The address with its revision resolved to a commit.
    pub(super) fn pinned(&self) -> Result<String, HubError> {
        let commit = if is_commit(&self.revision) {
            self.revision.clone()
        } else {
            self.list_files(&api()?)?.1
        };
        let path = self.path.as_ref().map(|path| format!("/{path}")).unwrap_or_default();
        Ok(format!("{SCHEME}{}@{commit}{path}", self.id))
    }

    /// Local paths of the selected files, sorted by name. Files that are not in the cache are
    /// fetched.
    pub(super) fn fetch(&self) -> Result<Vec<Utf8PathBuf>, HubError> {
        let api = api()?;
        let (files, commit) = match &self.path {
            // A file of a commit never changes, so a cached one is used without asking the hub.
            Some(path) if !path.contains('*') && is_commit(&self.revision) => {
                (vec![path.clone()], self.revision.clone())
            }
            _ => {
                let (files, commit) = self.list_files(&api)?;
                (self.select_files(&files)?, commit)
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

    /// All files of the data set, and the commit that its revision refers to.
    fn list_files(&self, api: &Api) -> Result<(Vec<String>, String), HubError> {
        let revision = self.revision.clone();
        let repo = Repo::with_revision(self.id.clone(), RepoType::Dataset, revision.clone());
        let info = api.repo(repo).info().map_err(|source| HubError::Info {
            id: self.id.clone(),
            revision,
            source,
        })?;
        Ok((info.siblings.into_iter().map(|file| file.rfilename).collect(), info.sha))
    }

    /// Selects from `files` those that match the path or, without one, those of the only split.
    fn select_files(&self, files: &[String]) -> Result<Vec<String>, HubError> {
        let rows = with_rows(files);
        let no_match = |wanted: &str| HubError::NoFile {
            id: self.id.clone(),
            wanted: wanted.to_owned(),
            found: if rows.is_empty() { "none".to_owned() } else { rows.join(", ") },
        };
        let Some(path) = &self.path else {
            if rows.is_empty() {
                return Err(no_match("*.parquet or *.jsonl"));
            }
            let id = self.id.clone();
            let chosen = only_split(&rows).map_err(|Ambiguous { what, names, example }| {
                HubError::Ambiguous { id, what, names: names.join(", "), example }
            })?;
            return self.complete(&rows, chosen);
        };
        let found: Vec<&str> = rows.iter().copied().filter(|file| matches(path, file)).collect();
        if found.is_empty() {
            return Err(no_match(path));
        }
        let (id, path) = (self.id.clone(), path.clone());
        let chosen = same_part(&found).map_err(|Ambiguous { names, example, .. }| {
            HubError::Mixed { id, path, names: names.join(", "), example }
        })?;
        self.complete(&rows, chosen)
    }

    /// The files that were chosen among `rows`, of whose shards the data set has all.
    fn complete(&self, rows: &[&str], chosen: Vec<&str>) -> Result<Vec<String>, HubError> {
        match missing_shard(rows, &chosen) {
            None => Ok(chosen.into_iter().map(str::to_owned).collect()),
            Some(missing) => Err(HubError::MissingShard {
                id: self.id.clone(),
                revision: self.revision.clone(),
                missing,
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

fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether `file` matches `pattern`, in which `*` matches any text, including `/`.
fn matches(pattern: &str, file: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == file };
    let Some(mut left) = file.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some((_, after)) = left.split_once(part) else { return false };
        left = after;
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
    fn addresses_are_parsed_like_hugging_face_does() {
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
    fn stars_match_any_text() {
        for (pattern, file, expected) in [
            ("data/*", "data/x.parquet", true),
            ("*.parquet", "data/x.parquet", true),
            ("d*-0*.p", "data/t-00.p", true),
            ("data/train-*.parquet", "data/test-0.parquet", false),
            ("a*b*b", "ab", false),
            ("a*b", "ab", true),
            ("a", "ab", false),
        ] {
            assert_eq!(matches(pattern, file), expected, "{pattern} {file}");
        }
    }

    #[test]
    fn the_only_split_is_the_default_and_one_of_several_must_be_named() {
        let files =
            |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let one =
            files(&["README.md", "data/t-1-00001-of-2.parquet", "data/t-1-00000-of-2.parquet"]);
        let chosen = source("hf://datasets/a/b").select_files(&one).unwrap();
        assert_eq!(chosen, ["data/t-1-00000-of-2.parquet", "data/t-1-00001-of-2.parquet"]);
        let two = files(&["data/dev-00000-of-1.parquet", "data/test-00000-of-1.parquet"]);
        let error = source("hf://datasets/a/b").select_files(&two).unwrap_err().to_string();
        assert!(error.contains("dev, test") && error.contains("a/b/data/dev-*.parquet"), "{error}");
        let chosen = source("hf://datasets/a/b/data/test-*").select_files(&two).unwrap();
        assert_eq!(chosen, ["data/test-00000-of-1.parquet"]);
        let error = source("hf://datasets/a/b/x*").select_files(&two).unwrap_err().to_string();
        assert!(error.contains("x*") && error.contains("data/dev-0"), "{error}");
    }
}
