//! Reads the reward from a verifier's files.

use super::value::python_float;
use serde_json::Value;
use std::collections::BTreeMap;

/// Folder to which a verifier writes its files.
pub const VERIFIER_FOLDER: &str = "/logs/verifier";
/// The files that can hold a reward. The first one that exists counts.
pub const REWARD_FILES: [&str; 2] = ["reward.json", "reward.txt"];

/// Why a verifier gave no reward. Harbor ends such a trial with an exception and without a reward,
/// which its metrics count as 0.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RewardProblem {
    /// The verifier wrote neither file.
    #[error("the verifier wrote neither /logs/verifier/reward.txt nor reward.json")]
    Missing,
    /// The file has no content.
    #[error("/logs/verifier/{0} is empty")]
    Empty(&'static str),
    /// The file is not a regular file.
    #[error("/logs/verifier/{0} is a symbolic link")]
    Link(&'static str),
    /// The file does not contain finite numbers.
    #[error("/logs/verifier/{0} does not contain finite numbers")]
    Invalid(&'static str),
    /// The file contains several rewards, and none is named `reward`.
    #[error("/logs/verifier/reward.json contains several rewards, and none is named `reward`")]
    Ambiguous,
}

/// The rewards by name: those of `reward.json`, else `reward` with the number in `reward.txt`.
///
/// # Errors
/// If neither file exists, or the file that counts does not contain finite numbers. There is no
/// fallback to the other file.
pub fn rewards(
    json: Option<&[u8]>,
    text: Option<&[u8]>,
) -> Result<BTreeMap<String, f64>, RewardProblem> {
    let [json_name, text_name] = REWARD_FILES;
    match (json, text) {
        (Some([]), _) => Err(RewardProblem::Empty(json_name)),
        (Some(json), _) => of_json(json).ok_or(RewardProblem::Invalid(json_name)),
        (None, Some([])) => Err(RewardProblem::Empty(text_name)),
        (None, Some(text)) => {
            let number = std::str::from_utf8(text).ok().and_then(python_float);
            let number = number.filter(|number| number.is_finite());
            let number = number.ok_or(RewardProblem::Invalid(text_name))?;
            Ok(BTreeMap::from([("reward".to_owned(), number)]))
        }
        (None, None) => Err(RewardProblem::Missing),
    }
}

fn of_json(json: &[u8]) -> Option<BTreeMap<String, f64>> {
    let Value::Object(object) = serde_json::from_slice::<Value>(json).ok()? else { return None };
    let numbers = object.into_iter().map(|(name, value)| match value {
        Value::Bool(flag) => Some((name, f64::from(u8::from(flag)))),
        Value::Number(number) => {
            number.as_f64().filter(|number| number.is_finite()).map(|number| (name, number))
        }
        _ => None,
    });
    numbers.collect()
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
            (None, Some("1_0"), Ok(10.0)),
            (None, Some("_1"), invalid("reward.txt")),
            (None, Some("inf"), invalid("reward.txt")),
            (None, Some("nan"), invalid("reward.txt")),
            (None, Some("one"), invalid("reward.txt")),
            (None, Some(""), Err(RewardProblem::Empty("reward.txt"))),
            (None, None, Err(RewardProblem::Missing)),
            (Some("{\"reward\": 0.25, \"style\": 1}"), Some("1"), Ok(0.25)),
            (Some("{\"accuracy\": 1}"), None, Ok(1.0)),
            (Some("{\"a\": 1, \"b\": 0}"), None, Err(RewardProblem::Ambiguous)),
            (Some("{}"), None, Err(RewardProblem::Ambiguous)),
            (Some("{\"reward\": true}"), None, Ok(1.0)),
            (Some("{\"reward\": \"1\"}"), Some("1"), invalid("reward.json")),
            (Some("{\"reward\": NaN}"), None, invalid("reward.json")),
            (Some("{\"reward\": 1e999}"), None, invalid("reward.json")),
            (Some("1"), None, invalid("reward.json")),
            (Some(""), Some("1"), Err(RewardProblem::Empty("reward.json"))),
        ] {
            assert_eq!(of(json, text), expected, "{json:?} {text:?}");
        }
    }
}
