//! Reads the reward from a verifier's files.

use super::value::python_float;
use orchestrate_types::UniqueKeys;
use serde_json::Value;
use std::collections::BTreeMap;

/// Folder to which a verifier writes its files.
pub const VERIFIER_FOLDER: &str = "/logs/verifier";
/// The files that can hold a reward. The first one that exists counts.
pub const REWARD_FILES: [&str; 2] = ["reward.json", "reward.txt"];

/// Why a verifier gave no reward that can be used. Harbor ends such a trial with an exception and
/// without a reward, which its metrics count as 0; only a reward out of range it takes as it is.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RewardProblem {
    /// The verifier wrote neither file.
    #[error("the verifier wrote neither /logs/verifier/reward.txt nor reward.json")]
    Missing,
    /// The file has no content.
    #[error("/logs/verifier/{0} is empty")]
    Empty(&'static str),
    /// The file is a symbolic link.
    #[error("/logs/verifier/{0} is a symbolic link")]
    Link(&'static str),
    /// It is neither a regular file nor a symbolic link.
    #[error(
        "/logs/verifier/{0} is a folder or a special file; the tests must write a regular file"
    )]
    Special(&'static str),
    /// The file does not contain finite numbers.
    #[error("/logs/verifier/{0} does not contain finite numbers")]
    Invalid(&'static str),
    /// A reward has several values.
    #[error("/logs/verifier/reward.json: {0}; the tests must write each reward once")]
    Repeated(String),
    /// The file contains several rewards, and none is named `reward`.
    #[error("/logs/verifier/reward.json contains several rewards, and none is named `reward`")]
    Ambiguous,
    /// The reward is a number that no episode may have.
    #[error("the verifier's reward is {0}, which is not from 0 to 1")]
    OutOfRange(f64),
}

/// The rewards by name: those of `reward.json`, else `reward` with the number in `reward.txt`.
///
/// # Errors
/// If neither file exists, the file that counts does not contain finite numbers, or the reward of the
/// episode is not from 0 to 1. There is no fallback to the other file. Other numbers next to the
/// reward may have any size.
pub fn rewards(
    json: Option<&[u8]>,
    text: Option<&[u8]>,
) -> Result<BTreeMap<String, f64>, RewardProblem> {
    let rewards = of_files(json, text)?;
    match reward(&rewards) {
        Ok(reward) if !(0.0..=1.0).contains(&reward) => Err(RewardProblem::OutOfRange(reward)),
        // Without a reward that counts, the numbers may still be those that a step requires.
        Ok(_) | Err(_) => Ok(rewards),
    }
}

fn of_files(
    json: Option<&[u8]>,
    text: Option<&[u8]>,
) -> Result<BTreeMap<String, f64>, RewardProblem> {
    let [json_name, text_name] = REWARD_FILES;
    match (json, text) {
        (Some([]), _) => Err(RewardProblem::Empty(json_name)),
        (Some(json), _) => of_json(json),
        (None, Some([])) => Err(RewardProblem::Empty(text_name)),
        (None, Some(text)) => {
            let number = std::str::from_utf8(text).ok().and_then(python_float);
            let number = number.filter(|number| number.is_finite());
            let number = number.ok_or(RewardProblem::Invalid(text_name))?;
            Ok(BTreeMap::from([("reward".to_owned(), without_sign_of_zero(number))]))
        }
        (None, None) => Err(RewardProblem::Missing),
    }
}

/// The number, with 0 for -0, which would be shown as another number.
fn without_sign_of_zero(number: f64) -> f64 {
    number + 0.0
}

/// The numbers of `reward.json`. Harbor takes the last of several with one name; which of them the tests mean
/// is not known.
fn of_json(json: &[u8]) -> Result<BTreeMap<String, f64>, RewardProblem> {
    let invalid = || RewardProblem::Invalid(REWARD_FILES[0]);
    let object = match serde_json::from_slice(json) {
        Ok(UniqueKeys(Value::Object(object))) => object,
        Err(error) if error.is_data() => return Err(RewardProblem::Repeated(error.to_string())),
        Ok(_) | Err(_) => return Err(invalid()),
    };
    let numbers = object.into_iter().map(|(name, value)| match value {
        Value::Bool(flag) => Some((name, f64::from(u8::from(flag)))),
        Value::Number(number) => {
            let number = number.as_f64().filter(|number| number.is_finite());
            number.map(|number| (name, without_sign_of_zero(number)))
        }
        _ => None,
    });
    numbers.collect::<Option<_>>().ok_or_else(invalid)
}

/// The reward of an episode: the one named `reward`, or the only one.
///
/// # Errors
/// [`RewardProblem::Ambiguous`] if there is none of that name and not exactly one.
pub fn reward(rewards: &BTreeMap<String, f64>) -> Result<f64, RewardProblem> {
    let mut values = rewards.values();
    match (rewards.get("reward"), values.next(), values.next()) {
        (Some(reward), ..) | (None, Some(reward), None) => Ok(*reward),
        (None, ..) => Err(RewardProblem::Ambiguous),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_as_harbor_reads_them() {
        let of = |json: Option<&str>, text: Option<&str>| {
            rewards(json.map(str::as_bytes), text.map(str::as_bytes)).and_then(|all| reward(&all))
        };
        let invalid = |file| Err(RewardProblem::Invalid(file));
        for (json, text, expected) in [
            (None, Some("1\n"), Ok(1.0)),
            (None, Some(" 0.5 "), Ok(0.5)),
            (None, Some("1_0"), Err(RewardProblem::OutOfRange(10.0))),
            (None, Some("0_1"), Ok(1.0)),
            (None, Some("37"), Err(RewardProblem::OutOfRange(37.0))),
            (None, Some("-1"), Err(RewardProblem::OutOfRange(-1.0))),
            (None, Some("1e9"), Err(RewardProblem::OutOfRange(1e9))),
            (None, Some("1.0000001"), Err(RewardProblem::OutOfRange(1.000_000_1))),
            (None, Some("-1e-300"), Err(RewardProblem::OutOfRange(-1e-300))),
            (None, Some("-0.0"), Ok(0.0)),
            (None, Some("1 # perfect"), invalid("reward.txt")),
            (None, Some("0.5\n0.7\n"), invalid("reward.txt")),
            (None, Some("_1"), invalid("reward.txt")),
            (None, Some("inf"), invalid("reward.txt")),
            (None, Some("nan"), invalid("reward.txt")),
            (None, Some("one"), invalid("reward.txt")),
            (None, Some(""), Err(RewardProblem::Empty("reward.txt"))),
            (None, None, Err(RewardProblem::Missing)),
            (Some("{\"reward\": 0.25, \"style\": 1}"), Some("1"), Ok(0.25)),
            (Some("{\"accuracy\": 1}"), None, Ok(1.0)),
            (Some("{\"accuracy\": 85}"), None, Err(RewardProblem::OutOfRange(85.0))),
            (Some("{\"reward\": 2, \"style\": 1}"), Some("1"), Err(RewardProblem::OutOfRange(2.0))),
            (Some("{\"reward\": 0.5, \"seconds\": 37, \"delta\": -4}"), None, Ok(0.5)),
            (Some("{\"seconds\": 37, \"delta\": -4}"), None, Err(RewardProblem::Ambiguous)),
            (Some("{\"a\": 1, \"b\": 0}"), None, Err(RewardProblem::Ambiguous)),
            (Some("{}"), None, Err(RewardProblem::Ambiguous)),
            (Some("{\"reward\": true}"), None, Ok(1.0)),
            (Some("{\"reward\": \"1\"}"), Some("1"), invalid("reward.json")),
            (Some("{\"reward\": NaN}"), None, invalid("reward.json")),
            (Some("{\"reward\": 1e999}"), None, invalid("reward.json")),
            (Some("1"), None, invalid("reward.json")),
            (
                Some("{\"reward\": 0, \"reward\": 1}"),
                Some("1"),
                Err(RewardProblem::Repeated(
                    "the key \"reward\" occurs twice at line 1 column 26".to_owned(),
                )),
            ),
            (Some(""), Some("1"), Err(RewardProblem::Empty("reward.json"))),
        ] {
            assert_eq!(of(json, text), expected, "{json:?} {text:?}");
        }
    }

    #[test]
    fn a_zero_has_no_sign() {
        for (json, text) in
            [(Some("{\"reward\": -0.0, \"style\": -0.0}"), None), (None, Some("-0"))]
        {
            let found = rewards(json.map(str::as_bytes), text.map(str::as_bytes)).unwrap();
            assert!(found.values().all(|reward| reward.to_string() == "0"), "{found:?}");
        }
    }
}
