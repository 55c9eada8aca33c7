//! Which files of a data set belong together: those of one split of one configuration.
//!
//! The invariant: files are joined only if they are in the same folder and have the same name but
//! for the number of their shard. Files of different splits are never joined, because rows for a
//! test would be trained on.

use std::collections::{BTreeMap, BTreeSet};

/// Extensions of files that contain rows.
const EXTENSIONS: [&str; 5] = [".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz"];
/// Files that describe a data set, as Hugging Face's own libraries name them.
const DESCRIPTIONS: [&str; 5] =
    ["dataset_infos.json", "dataset_info.json", "dataset_dict.json", "config.json", "state.json"];
/// Words in the names of splits, as Hugging Face's own libraries know them, and which part of a data
/// set such a split is.
const SPLITS: [(&str, Part); 10] = [
    ("train", Part::Training),
    ("training", Part::Training),
    ("validation", Part::Validation),
    ("valid", Part::Validation),
    ("val", Part::Validation),
    ("dev", Part::Validation),
    ("test", Part::Test),
    ("testing", Part::Test),
    ("eval", Part::Test),
    ("evaluation", Part::Test),
];
/// What may follow such a word without a separator, as in `trainset`.
const SUFFIXES: [&str; 2] = ["set", "data"];
/// Number of digits from which a number at the end of a name is that of a shard. A shorter one is
/// that of a shard if it begins with 0: others may be years or versions.
const SHARD_DIGITS: usize = 5;
/// Characters around the number of a shard: `train-00000-of-00003`, `train_00000_of_00003`,
/// `train.00000-of-00003`.
const SEPARATORS: [char; 3] = ['-', '_', '.'];
/// Number of digits of the numbers of shards. A longer number is another part of the name, and could
/// not be counted up to.
const COUNT_DIGITS: usize = 9;

/// A part of a data set by its purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Training,
    Validation,
    Test,
}

impl Part {
    /// The parts that a name of a file or a folder mentions, in its order. A word counts wherever it
    /// is, because names begin with anything: `my_train_set`, `x.test`, `split=dev`.
    fn all_in(name: &str) -> Vec<Self> {
        name.split(|c: char| !c.is_ascii_alphabetic()).filter_map(Self::of_word).collect()
    }

    fn of_word(word: &str) -> Option<Self> {
        let word = word.to_ascii_lowercase();
        let bare = SUFFIXES.into_iter().find_map(|suffix| word.strip_suffix(suffix));
        let bare = bare.unwrap_or(&word);
        SPLITS.into_iter().find(|(split, _)| *split == bare).map(|(_, part)| part)
    }
}

/// A file of rows, by its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct NamedFile<'a> {
    /// Its folder, without a slash at the end.
    folder: &'a str,
    /// Its name without extension and without the number of a shard; empty if it is only a number.
    base: &'a str,
}

impl<'a> NamedFile<'a> {
    fn of(file: &'a str) -> Self {
        let (folder, name) = file.rsplit_once('/').unwrap_or(("", file));
        Self { folder, base: without_shard(stem(name)) }
    }

    /// The name of its split, and which parts of the data set that mentions: the file's own name if it
    /// mentions any, else that of the nearest folder that does, else the file's own.
    fn split(&self) -> (&'a str, Vec<Part>) {
        let folders = self.folder.rsplit('/');
        std::iter::once(self.base)
            .chain(folders)
            .map(|name| (name, Part::all_in(name)))
            .find(|(_, parts)| !parts.is_empty())
            .unwrap_or((self.base, Vec::new()))
    }

    fn label(&self) -> String {
        let parts = [self.folder, self.base].into_iter().filter(|part| !part.is_empty());
        parts.collect::<Vec<_>>().join("/")
    }
}

/// The files of rows among `files`, sorted by name. Descriptions of the data set are not among them,
/// nor are files and folders whose name begins with a dot or two underscores.
pub(super) fn with_rows(files: &[String]) -> Vec<&str> {
    let is_hidden = |part: &str| part.starts_with('.') || part.starts_with("__");
    let mut rows: Vec<&str> = files
        .iter()
        .map(String::as_str)
        .filter(|file| EXTENSIONS.iter().any(|extension| file.ends_with(extension)))
        .filter(|file| !file.split('/').any(is_hidden))
        .filter(|file| !DESCRIPTIONS.contains(&file.rsplit('/').next().unwrap_or(file)))
        .collect();
    rows.sort_unstable();
    rows
}

/// Files between which the user must choose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ambiguous {
    /// What there are several of: `splits` or `configurations`.
    pub(super) what: &'static str,
    /// Their names.
    pub(super) names: Vec<String>,
    /// A path that matches the files of the first one.
    pub(super) example: String,
}

/// The name of a file that is missing in `files`: a shard of the same file as one of `chosen`, whose
/// name says how many there are.
pub(super) fn missing_shard(files: &[&str], chosen: &[&str]) -> Option<String> {
    chosen.iter().find_map(|file| {
        let shard = Shard::of_file(file)?;
        let others = files.iter().filter_map(|other| Shard::of_file(other));
        let present: BTreeSet<u64> =
            others.filter(|other| other.is_beside(&shard)).map(|other| other.index).collect();
        // Some tools count from 1.
        let first = u64::from(!present.contains(&0) && present.contains(&shard.count));
        let index = (first..shard.count + first).find(|index| !present.contains(index))?;
        let (before, width) = (shard.before, shard.width);
        Some(format!("{before}{index:0width$}{}", shard.after))
    })
}

/// The files, if all of them belong to one split of one configuration.
///
/// # Errors
/// If they belong to several.
pub(super) fn only_split<'a>(files: &[&'a str]) -> Result<Vec<&'a str>, Ambiguous> {
    let mut groups: BTreeMap<NamedFile<'a>, Vec<&str>> = BTreeMap::new();
    for file in files {
        groups.entry(NamedFile::of(file)).or_default().push(file);
    }
    match groups.values().next() {
        Some(first) if groups.len() > 1 => Err(ambiguous(groups.keys(), first)),
        Some(_) | None => Ok(files.to_vec()),
    }
}

/// Files that a path of the user's own selects. They may be of several configurations, which the
/// path then names, but not of different parts of the data set, such as training and test.
///
/// # Errors
/// If they are of different parts.
pub(super) fn same_part<'a>(files: &[&'a str]) -> Result<Vec<&'a str>, Ambiguous> {
    let named: BTreeSet<NamedFile<'a>> = files.iter().map(|file| NamedFile::of(file)).collect();
    let parts: BTreeSet<Vec<Part>> = named.iter().map(|file| file.split().1).collect();
    match files.first() {
        Some(first) if parts.len() > 1 => Err(ambiguous(named.iter(), &[*first])),
        Some(_) | None => Ok(files.to_vec()),
    }
}

fn ambiguous<'a>(
    named: impl Iterator<Item = &'a NamedFile<'a>> + Clone,
    first: &[&str],
) -> Ambiguous {
    let splits: BTreeSet<&str> = named.clone().map(|file| file.split().0).collect();
    let folders: BTreeSet<&str> = named.clone().map(|file| file.folder).collect();
    let name = |file: &NamedFile<'_>| {
        if folders.len() > 1 { file.label() } else { file.base.to_owned() }
    };
    Ambiguous {
        what: if splits.len() > 1 { "splits" } else { "configurations" },
        names: named.map(name).collect(),
        example: first.first().map(|file| pattern(file)).unwrap_or_default(),
    }
}

/// The name of a file without its extensions.
fn stem(name: &str) -> &str {
    let extension = EXTENSIONS.into_iter().filter(|extension| name.ends_with(extension));
    let longest = extension.map(str::len).max().unwrap_or_default();
    name.get(..name.len() - longest).unwrap_or(name)
}

/// A name without the number of a shard: `train` for `train-00000-of-00003` and for `train-0000`.
fn without_shard(stem: &str) -> &str {
    if let Some(shard) = Shard::of_stem(stem) {
        return shard.before.strip_suffix(SEPARATORS).unwrap_or(shard.before);
    }
    let (name, number) = stem.rsplit_once(SEPARATORS).unwrap_or(("", stem));
    let is_shard = number.starts_with('0') || number.len() >= SHARD_DIGITS;
    if is_number(number) && is_shard { name } else { stem }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// The name of one file of a known number of them, as `train-00000-of-00003`.
#[derive(Debug, PartialEq, Eq)]
struct Shard<'a> {
    /// What is before the number.
    before: &'a str,
    index: u64,
    /// Digits of the number.
    width: usize,
    count: u64,
    /// What is after the number.
    after: &'a str,
    /// What is after the number of files: an extension, and a hash before it in some data sets.
    end: &'a str,
}

impl<'a> Shard<'a> {
    fn of_stem(stem: &'a str) -> Option<Self> {
        let number = |text: &str| -> Option<u64> {
            (is_number(text) && text.len() <= COUNT_DIGITS).then(|| text.parse().ok())?
        };
        let of = |separator: char| format!("{separator}of{separator}");
        let mut places = ['-', '_'].into_iter().flat_map(|separator| {
            stem.match_indices(&of(separator)).map(|(at, _)| at).collect::<Vec<_>>()
        });
        places.find_map(|at| {
            let (numbered, after) = (stem.get(..at)?, stem.get(at..)?);
            let count = after.get(4..)?.split(SEPARATORS).next()?;
            let start = numbered.rfind(SEPARATORS).map_or(0, |separator| separator + 1);
            let (before, index) = numbered.split_at_checked(start)?;
            let end = after.get(4 + count.len()..)?;
            // A hash may follow the count, but the name of a split is part of the name.
            let is_shard = Part::all_in(end).is_empty();
            let width = index.len();
            let (index, count) = (number(index)?, number(count)?);
            is_shard.then_some(Self { before, index, width, count, after, end })
        })
    }

    fn of_file(file: &'a str) -> Option<Self> {
        let name = file.rfind('/').map_or(0, |slash| slash + 1);
        let shard = Self::of_stem(file.get(name..)?)?;
        let before = file.get(..name + shard.before.len())?;
        Some(Self { before, ..shard })
    }

    /// Whether two files are parts of the same whole. Their hashes differ.
    fn is_beside(&self, other: &Self) -> bool {
        let is_same = |of: fn(&Self) -> &str| of(self) == of(other);
        let extension =
            |end: &str| end.split_once('.').map_or("", |(_, extension)| extension).to_owned();
        is_same(|shard| shard.before)
            && self.count == other.count
            && extension(self.end) == extension(other.end)
    }
}

/// A path that matches all shards of `file`'s split, and no other file of its folder.
fn pattern(file: &str) -> String {
    let (folder, name) = file.rsplit_once('/').unwrap_or(("", file));
    let (stem, slash) = (stem(name), if folder.is_empty() { "" } else { "/" });
    let base = without_shard(stem);
    if base == stem {
        return file.to_owned();
    }
    let extension = name.get(stem.len()..).unwrap_or_default();
    let separator = stem.get(base.len()..base.len() + usize::from(!base.is_empty()));
    format!("{folder}{slash}{base}{}*{extension}", separator.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(files: &[&str]) -> Result<Vec<String>, String> {
        let files: Vec<String> = files.iter().map(|file| (*file).to_owned()).collect();
        let chosen = only_split(&with_rows(&files));
        chosen
            .map(|files| files.into_iter().map(str::to_owned).collect())
            .map_err(|many| format!("{}: {}: {}", many.what, many.names.join(", "), many.example))
    }

    #[test]
    fn one_split_of_one_configuration_is_chosen() {
        for (files, right) in [
            (
                vec!["dataset_infos.json", "README.md", "data/train-00000-of-00001.parquet"],
                vec!["data/train-00000-of-00001.parquet"],
            ),
            (
                vec!["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet"],
                vec!["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            ),
            (
                vec!["gpt-05-runs/train-00000-of-00001.parquet"],
                vec!["gpt-05-runs/train-00000-of-00001.parquet"],
            ),
            (
                vec!["d/train-00000-of-00001-1b2c3d.parquet"],
                vec!["d/train-00000-of-00001-1b2c3d.parquet"],
            ),
            (vec!["0000.parquet", "0001.parquet"], vec!["0000.parquet", "0001.parquet"]),
            (
                vec!["en/c4-train.00000-of-00002.json.gz", "en/c4-train.00001-of-00002.json.gz"],
                vec!["en/c4-train.00000-of-00002.json.gz", "en/c4-train.00001-of-00002.json.gz"],
            ),
            (
                vec!["train_00000_of_00002.jsonl", "train_00001_of_00002.jsonl"],
                vec!["train_00000_of_00002.jsonl", "train_00001_of_00002.jsonl"],
            ),
            (
                vec!["rows_00.jsonl.gz", "rows_01.jsonl.gz", "sub/dataset_info.json"],
                vec!["rows_00.jsonl.gz", "rows_01.jsonl.gz"],
            ),
            (
                vec![".cache/x.json", "__old__/test.jsonl", "config.json", "rows.jsonl"],
                vec!["rows.jsonl"],
            ),
            (vec!["README.md"], vec![]),
        ] {
            assert_eq!(chosen(&files).unwrap(), right, "{files:?}");
        }
    }

    #[test]
    fn files_of_several_splits_or_configurations_are_never_joined() {
        for (files, right) in [
            (
                vec!["lite/test-00000-of-00001.parquet", "verified/test-00000-of-00001.parquet"],
                "configurations: lite/test, verified/test: lite/test-*.parquet",
            ),
            (
                vec!["en/train.jsonl", "en/train_extra.jsonl"],
                "splits: train, train_extra: en/train.jsonl",
            ),
            (
                vec![
                    "train/shard-0000.parquet",
                    "train/shard-0001.parquet",
                    "test/shard-0000.parquet",
                ],
                "splits: test/shard, train/shard: test/shard-*.parquet",
            ),
            (
                vec!["default/train/0000.parquet", "default/test/0000.parquet"],
                "splits: default/test, default/train: default/test/*.parquet",
            ),
            (
                vec!["a/partial-train/0000.parquet", "b/partial-train/0000.parquet"],
                "configurations: a/partial-train, b/partial-train: a/partial-train/*.parquet",
            ),
            (vec!["fold_1.jsonl", "fold_2.jsonl"], "splits: fold_1, fold_2: fold_1.jsonl"),
            (vec!["y-2023.json", "y-2024.json"], "splits: y-2023, y-2024: y-2023.json"),
            (
                vec!["en/c4-train.00000-of-00001.json", "en/c4-validation.00000-of-00001.json"],
                "splits: c4-train, c4-validation: en/c4-train.*.json",
            ),
            (vec!["test_0_of_1.jsonl", "train_0_of_1.jsonl"], "splits: test, train: test_*.jsonl"),
            (vec!["train.jsonl", "test.json.gz"], "splits: test, train: test.json.gz"),
            (
                vec!["train.jsonl", "data/train.jsonl"],
                "configurations: train, data/train: train.jsonl",
            ),
            (vec!["Train-01.jsonl", "TEST-01.jsonl"], "splits: TEST, Train: TEST-*.jsonl"),
            (
                vec!["train-of-2/a.jsonl", "dev-of-2/a.jsonl"],
                "splits: dev-of-2/a, train-of-2/a: dev-of-2/a.jsonl",
            ),
        ] {
            assert_eq!(chosen(&files).unwrap_err(), right, "{files:?}");
        }
    }

    #[test]
    fn a_path_of_the_users_may_join_configurations_but_not_training_and_test() {
        let joined = ["lite/test-00000-of-00001.parquet", "verified/test-00000-of-00001.parquet"];
        assert_eq!(same_part(&joined).unwrap(), joined);
        let joined = ["unit-test-lite/train.jsonl", "verified/my_train_set.jsonl"];
        assert_eq!(same_part(&joined).unwrap(), joined);
        for files in [
            vec!["data/test-0.parquet", "data/train-0.parquet"],
            vec!["default/test/0000.parquet", "default/train/0000.parquet"],
            vec!["data/dev.jsonl", "data/eval.jsonl"],
            vec!["data/other.jsonl", "data/test.jsonl"],
            vec!["x.test.jsonl", "x.train.jsonl"],
            vec!["data/a-test", "data/a-train"],
            vec!["data/my_eval_set.jsonl", "data/my_train_set.jsonl"],
            vec!["testset.jsonl", "trainset.jsonl"],
            vec!["TestData.jsonl", "TrainData.jsonl"],
            vec!["shard_test_0.jsonl", "shard_train_0.jsonl"],
            vec!["split=test/x.jsonl", "split=train/x.jsonl"],
            vec!["eval_test.jsonl", "eval_train.jsonl"],
            vec!["train_test.jsonl", "test_train.jsonl"],
            vec!["x-00000-of-00001-test.jsonl", "x-00000-of-00001-train.jsonl"],
        ] {
            assert_eq!(only_split(&files).unwrap_err().what, "splits", "{files:?}");
            assert_eq!(same_part(&files).unwrap_err().what, "splits", "{files:?}");
        }
    }

    #[test]
    fn a_shard_that_the_data_set_lacks_is_named() {
        let missing = |files: &[&str], chosen: &[&str]| missing_shard(files, chosen);
        for (files, right) in [
            (vec!["train-00000-of-00002.parquet"], "train-00001-of-00002.parquet"),
            (vec!["d/t-1-of-3.jsonl", "d/t-3-of-3.jsonl"], "d/t-2-of-3.jsonl"),
            (vec!["en/c4-train.00001-of-00002.json"], "en/c4-train.00000-of-00002.json"),
            (vec!["en/c4-train.00000-of-00002.json.gz"], "en/c4-train.00001-of-00002.json.gz"),
            (vec!["train_00000_of_00002.jsonl"], "train_00001_of_00002.jsonl"),
            (vec!["t-999999998-of-999999999.jsonl"], "t-000000000-of-999999999.jsonl"),
            (
                vec!["d/train-00001-of-00002-1b2c3d.parquet", "e/train-00000-of-00002.parquet"],
                "d/train-00000-of-00002-1b2c3d.parquet",
            ),
            (
                vec!["a-00000-of-00002.parquet", "a-00001-of-00002.jsonl"],
                "a-00001-of-00002.parquet",
            ),
        ] {
            assert_eq!(missing(&files, &files).as_deref(), Some(right), "{files:?}");
        }
        for files in [
            vec!["train-00000-of-00001.parquet"],
            vec!["t-2-of-2.jsonl", "t-1-of-2.jsonl"],
            vec!["t-00000-of-00002-aa.parquet", "t-00001-of-00002-bb.parquet"],
            vec!["0000.parquet", "0002.parquet"],
            vec!["best-of-8.jsonl", "best_of_8.jsonl"],
            // Such numbers are not of shards.
            vec!["train-18446744073709551615-of-18446744073709551615.jsonl"],
            vec!["train-00000-of-00000.jsonl"],
        ] {
            assert_eq!(missing(&files, &files), None, "{files:?}");
        }
        let whole = ["t-00000-of-00002.parquet", "t-00001-of-00002.parquet"];
        assert_eq!(missing(&whole, &whole[1..]), None);
    }

    #[test]
    fn words_that_only_resemble_a_split_are_none() {
        for name in ["trainer", "tests", "testify", "development", "valued", "evals", "dataset", ""]
        {
            assert_eq!(Part::all_in(name), [], "{name}");
        }
        for name in ["train", "train-v2", "TRAIN_a", "train0", "my_train_set", "0.trainset"] {
            assert_eq!(Part::all_in(name), [Part::Training], "{name}");
        }
        assert_eq!(Part::all_in("eval-train"), [Part::Test, Part::Training]);
    }
}
