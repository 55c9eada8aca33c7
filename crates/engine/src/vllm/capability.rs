//! Checks whether the settings that vLLM reports allow training with routing replay.

use crate::capability::{CapabilityFinding, Release, check_version};
use serde_json::Value;

/// The first release that keeps routing rows together with their KV blocks.
const OLDEST_RELEASE: Release = (0, 31, 0);
/// Settings for display, as `(our name, vLLM's name)`.
const FACTS: [(&str, &str); 5] = [
    ("tensor parallel", "tensor_parallel_size"),
    ("data parallel", "data_parallel_size"),
    ("pipeline parallel", "pipeline_parallel_size"),
    ("prefix cache", "enable_prefix_caching"),
    ("MoE backend", "moe_backend"),
];

/// Settings that are on or off.
const SWITCHES: [&str; 3] =
    ["enable_return_routed_experts", "enable_prefix_caching", "enable_eplb"];
/// Settings that are numbers of workers.
const SIZES: [&str; 3] =
    ["data_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"];

/// The settings in `/server_info`: the text of a Python object by default, a JSON object on request.
#[derive(Debug)]
pub(super) struct ServerSettings(Value);

impl ServerSettings {
    pub(super) fn new(mut reply: Value) -> Self {
        Self(reply.get_mut("vllm_config").map(Value::take).unwrap_or_default())
    }

    /// A setting's value as text, at any depth; `None` if it is absent, null or Python's `None`.
    fn get(&self, name: &str) -> Option<String> {
        let found = match &self.0 {
            Value::String(text) => in_text(text, name)?.to_owned(),
            object => match in_object(object, name)? {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            },
        };
        (!matches!(found.as_str(), "None" | "null" | "")).then_some(found)
    }

    fn is_on(&self, name: &str) -> Option<bool> {
        self.get(name).map(|value| value.eq_ignore_ascii_case("true"))
    }

    fn size(&self, name: &str) -> Option<usize> {
        self.get(name)?.parse().ok()
    }

    fn is_multiple(&self, name: &str) -> bool {
        self.size(name).is_some_and(|size| size > 1)
    }

    /// Number of data-parallel ranks behind the address.
    pub(super) fn ranks(&self) -> usize {
        self.size("data_parallel_size").unwrap_or(1)
    }

    pub(super) fn returns_routed_experts(&self) -> bool {
        self.is_on("enable_return_routed_experts").unwrap_or(false)
    }

    pub(super) fn facts(&self) -> Vec<(&'static str, String)> {
        FACTS.iter().filter_map(|(shown, name)| Some((*shown, self.get(name)?))).collect()
    }

    /// The settings that decide whether rows are complete, but whose value is not of their type.
    fn unread(&self) -> Vec<&'static str> {
        let is_unread = |name: &str, is_read: &dyn Fn(&str) -> bool| {
            self.get(name).is_some_and(|value| !is_read(&value))
        };
        let is_switch =
            |value: &str| ["true", "false"].iter().any(|known| value.eq_ignore_ascii_case(known));
        let switches = SWITCHES.into_iter().filter(|name| is_unread(name, &is_switch));
        let is_size = |value: &str| value.parse::<usize>().is_ok();
        switches.chain(SIZES.into_iter().filter(|name| is_unread(name, &is_size))).collect()
    }

    fn add_findings(&self, findings: &mut Vec<CapabilityFinding>) {
        let unread = self.unread();
        if !unread.is_empty() {
            findings.push(CapabilityFinding::refusal(
                "settings-unread",
                format!("the server reports no valid value of {}", unread.join(", ")),
                "start a release of vLLM that this program knows",
            ));
        }
        if !self.returns_routed_experts() {
            findings.push(CapabilityFinding::refusal(
                "routing-off",
                "the server does not return routed experts",
                "start it with --enable-return-routed-experts",
            ));
        }
        if self.is_on("enable_prefix_caching") == Some(false) {
            findings.push(CapabilityFinding::warning(
                "prefix-cache-off",
                "every turn prefills the whole conversation again",
                "start it with --enable-prefix-caching",
            ));
        }
        if self.is_multiple("pipeline_parallel_size") {
            findings.push(CapabilityFinding::refusal(
                "pipeline-parallel",
                "rows of the other pipeline stages are missing",
                "start it with --pipeline-parallel-size 1",
            ));
        }
        if self.is_multiple("decode_context_parallel_size") {
            findings.push(CapabilityFinding::refusal(
                "context-parallel",
                "rows are not gathered over context-parallel ranks",
                "start it with --decode-context-parallel-size 1",
            ));
        }
        if self.is_on("enable_eplb") == Some(true) {
            findings.push(CapabilityFinding::warning(
                "expert-load-balancing",
                "experts are moved or copied, but replay needs logical expert ids, not physical ones",
                "start it without --enable-eplb, unless the trainer's own routing agrees with \
                 the rows",
            ));
        }
        if self.get("kv_transfer_config").is_some() || self.get("kv_connector").is_some() {
            findings.push(CapabilityFinding::refusal(
                "disaggregation",
                "KV that is transferred from another worker comes without its routed experts",
                "start it without --kv-transfer-config",
            ));
        }
    }
}

/// All unsupported or doubtful properties of a server.
pub(super) fn findings(
    version: Option<&str>,
    settings: Option<&ServerSettings>,
) -> Vec<CapabilityFinding> {
    let defect = "routed experts could be lost with the prefix cache";
    let mut findings: Vec<CapabilityFinding> =
        check_version("vLLM", version, OLDEST_RELEASE, defect).into_iter().collect();
    match settings {
        Some(settings) => settings.add_findings(&mut findings),
        None => findings.push(CapabilityFinding::refusal(
            "developer-mode-off",
            "the weights cannot be replaced and the settings cannot be read",
            "start it with VLLM_SERVER_DEV_MODE=1 in its environment, in a private network: the \
             routes of this mode do not require the API key",
        )),
    }
    findings
}

/// `name=value` in the text of a Python object, up to the next separator.
fn in_text<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut from = 0;
    loop {
        let start = from + text.get(from..)?.find(name)?;
        let end = start + name.len();
        let is_whole_name = text
            .get(..start)?
            .chars()
            .next_back()
            .is_none_or(|before| !(before.is_alphanumeric() || before == '_'));
        if is_whole_name && let Some(value) = text.get(end..)?.strip_prefix('=') {
            let stop = value.find([',', ')']).unwrap_or(value.len());
            return value.get(..stop).map(|value| value.trim_matches('\''));
        }
        from = end;
    }
}

/// The first value under this key, at any depth.
fn in_object<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    match value {
        Value::Object(map) => {
            map.get(name).or_else(|| map.values().find_map(|inner| in_object(inner, name)))
        }
        Value::Array(list) => list.iter().find_map(|inner| in_object(inner, name)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    }
}

/// Tokens per block of the prefix cache. Only the metrics report it.
pub(super) fn block_size(metrics: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(metrics).ok()?;
    let line = text.lines().find(|line| line.starts_with("vllm:cache_config_info{"))?;
    let labels = line.split_once('{')?.1.split(',');
    let rest = labels.into_iter().find_map(|label| label.strip_prefix("block_size=\""))?;
    rest.split('"').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::Severity;
    use serde_json::json;

    const TEXT: &str = "model='m', pipeline_parallel_size=1, data_parallel_size=1, \
        aux_output_config=AuxOutputConfig(enable_return_routed_experts=True, max_bytes=None), \
        enable_prefix_caching=True, kernel_config=KernelConfig(moe_backend='auto')";

    fn named(version: &str, text: &str) -> Vec<(&'static str, Severity)> {
        let settings = ServerSettings::new(json!({"vllm_config": text}));
        let found = findings(Some(version), Some(&settings));
        assert!(found.iter().all(|f| !f.remedy.is_empty() && !f.problem.is_empty()));
        found.into_iter().map(|finding| (finding.name, finding.severity)).collect()
    }

    #[test]
    fn every_unsupported_mode_is_found() {
        use Severity::{Refusal, Warning};
        assert_eq!(named("0.32.0", TEXT), []);
        assert_eq!(named("0.28.1", TEXT), [("version", Refusal)]);
        for (old, new, name, severity) in [
            ("experts=True", "experts=False", "routing-off", Refusal),
            ("pipeline_parallel_size=1", "pipeline_parallel_size=2", "pipeline-parallel", Refusal),
            ("model='m'", "decode_context_parallel_size=4", "context-parallel", Refusal),
            ("caching=True", "caching=False", "prefix-cache-off", Warning),
            ("model='m'", "enable_eplb=True", "expert-load-balancing", Warning),
            ("model='m'", "kv_transfer_config=KVTransferConfig()", "disaggregation", Refusal),
        ] {
            assert!(TEXT.contains(old));
            assert_eq!(named("0.32.0", &TEXT.replace(old, new)), [(name, severity)], "{new}");
        }
        assert_eq!(named("0.32.0", &TEXT.replace("model='m'", "kv_transfer_config=None")), []);
        let without_settings = findings(Some("0.32.0"), None);
        assert_eq!((without_settings.len(), without_settings[0].name), (1, "developer-mode-off"));
    }

    #[test]
    fn settings_whose_value_has_another_type_are_refused_by_name() {
        let unread = |settings: Value| {
            let settings = ServerSettings::new(json!({"vllm_config": settings}));
            let found = findings(Some("0.32.0"), Some(&settings));
            let found = found.into_iter().find(|found| found.name == "settings-unread");
            found.map(|found| (found.severity, found.to_string()))
        };
        let whole = json!({"enable_return_routed_experts": true, "pipeline_parallel_size": 1});
        assert_eq!(unread(whole.clone()), None);
        for (name, value) in [
            ("enable_return_routed_experts", json!("yes")),
            ("enable_eplb", json!(1)),
            ("data_parallel_size", json!(2.0)),
            ("pipeline_parallel_size", json!("two")),
            ("decode_context_parallel_size", json!([2])),
        ] {
            let mut damaged = whole.clone();
            damaged[name] = value;
            let (severity, text) = unread(damaged).unwrap();
            assert_eq!(severity, Severity::Refusal);
            assert!(text.contains(name), "{text}");
        }
    }

    #[test]
    fn settings_are_found_in_text_and_in_objects() {
        let text = ServerSettings::new(json!({"vllm_config": TEXT}));
        let object = ServerSettings::new(json!({"vllm_config": {
            "parallel_config": {"pipeline_parallel_size": 1},
            "aux": [{"enable_return_routed_experts": true}],
            "kernel_config": {"moe_backend": "auto"},
        }}));
        for settings in [text, object] {
            assert!(settings.returns_routed_experts());
            assert!(!settings.is_multiple("pipeline_parallel_size"));
            assert_eq!(settings.get("moe_backend").as_deref(), Some("auto"));
            // Parts of longer names.
            assert_eq!(settings.get("parallel_size"), None);
            assert_eq!(settings.get("max_bytes"), None);
        }
        assert!(!ServerSettings::new(json!([])).returns_routed_experts());
    }

    #[test]
    fn the_block_size_is_read_from_the_metrics() {
        let line = |labels: &str| format!("# HELP x\nvllm:cache_config_info{{{labels}}} 1.0\n");
        let labels = r#"a_block_size="8",block_size="32",effective_attention_block_size="64""#;
        assert_eq!(block_size(line(labels).as_bytes()), Some(32));
        assert_eq!(block_size(line(r#"block_size="16""#).as_bytes()), Some(16));
        for unreadable in [line(""), line(r#"block_size="None""#), String::new()] {
            assert_eq!(block_size(unreadable.as_bytes()), None);
        }
        assert_eq!(block_size(b"\xff"), None);
    }
}
