//! Rows inside NeMo-Gym's records, the format of Nemotron's training data for software engineering.

use super::parsed;
use serde_json::Value;

/// Data sets that these records name and that cannot be run here, with the reason.
const REFUSED: [(&str, &str); 6] = [
    ("nv-internal-1", "its tests are run by scripts of its own images, which are not public"),
    ("swe-bench-ext", "its tests are run by commands that its records do not have"),
    ("deepswe", "it is a Harbor task; use `tasks import harbor`"),
    ("denovoswe", "its tasks start from an empty tree and are graded by a script of NeMo-Gym's"),
    ("SWE-bench-Live", "its images and commands are its own"),
    ("SWE-bench_Multilingual", "its repositories are not in SWE-bench's table"),
];

/// The row inside a record of NeMo-Gym's environments, or the reason why there is none; `None` if
/// `value` is not such a record. Flat records have the row's columns themselves.
pub(super) fn inner(value: &mut Value) -> Option<Result<Value, String>> {
    if value.get("expected_action").is_some() && value.get("responses_create_params").is_some() {
        let reason = "is a single step of an episode (`expected_action`), not a task to solve";
        return Some(Err(reason.to_owned()));
    }
    let from = if value.get("instance").is_some() {
        value
    } else {
        value.get_mut("responses_create_params")?.get_mut("metadata")?
    };
    let data_set = from.get("dataset_name").filter(|name| !name.is_null()).cloned();
    let column = ["instance", "instance_dict"].into_iter().find(|name| from.get(name).is_some())?;
    let data_set = match data_set {
        None => String::new(),
        Some(Value::String(name)) => name,
        // The data set decides whether the row can be graded.
        Some(_) => return Some(Err("column `dataset_name` is not text".to_owned())),
    };
    if let Some((name, why)) = REFUSED.into_iter().find(|(name, _)| data_set.contains(name)) {
        return Some(Err(format!("is of the data set `{name}`, which is not supported: {why}")));
    }
    let row = parsed(from.get_mut(column).map(Value::take));
    Some(row.ok_or_else(|| format!("column `{column}` is not an object or its JSON text")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_are_found_where_the_environments_have_them() {
        let row = json!({"instance_id": "a"});
        let metadata = |data_set: &str, inner: Value| {
            json!({"responses_create_params":
                {"metadata": {"dataset_name": data_set, "instance_dict": inner}}})
        };
        for mut record in [
            metadata("SWE-Gym/SWE-Gym", row.to_string().into()),
            metadata("R2E-Gym/R2E-Gym-Subset", row.clone()),
            json!({"dataset_name": "SWE-Gym/SWE-Gym", "instance": row.clone()}),
        ] {
            assert_eq!(inner(&mut record), Some(Ok(row.clone())));
        }
        assert_eq!(inner(&mut row.clone()), None);
        assert_eq!(inner(&mut json!({"responses_create_params": {"input": []}})), None);
        let mut unnamed = json!({"dataset_name": ["nvidia/x"], "instance": row.clone()});
        let refused = inner(&mut unnamed).unwrap().unwrap_err();
        assert_eq!(refused, "column `dataset_name` is not text");
        for (name, _) in REFUSED {
            let refused = inner(&mut metadata(name, row.clone())).unwrap().unwrap_err();
            assert!(refused.contains(name), "{refused}");
        }
        let broken = inner(&mut metadata("SWE-Gym", "{".into())).unwrap().unwrap_err();
        assert!(broken.contains("instance_dict"), "{broken}");
    }
}
