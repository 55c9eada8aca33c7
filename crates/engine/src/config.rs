//! The section `[engine]`.

use crate::EngineKind;
use crate::kind::NEEDED;
use camino::Utf8PathBuf;
use orchestrate_types::{ConfigProblem, HumanDuration};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Which inference engine samples, and with which model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EngineSection {
    /// Base URL of an inference server, e.g. `http://127.0.0.1:30000`. Absent: the embedded
    /// engine.
    pub url: Option<String>,
    /// What the server at `url` speaks: "sglang" (0.5.12 and later, the default) or "vllm" (0.31
    /// and later).
    pub kind: Option<String>,
    /// Folder of the starting checkpoint in Hugging Face layout (config, weights, tokenizer,
    /// chat template).
    pub model: Option<String>,
    /// Folder of the tokenizer, where it is not the model's.
    pub tokenizer: Option<String>,
    /// Name of the environment variable that holds the server's API key.
    pub api_key_env: Option<String>,
    /// Longest time one generation may take. Default: "20m".
    pub request_timeout: Option<HumanDuration>,
    /// Longest time one weight update may take. Default: "10m".
    pub sync_timeout: Option<HumanDuration>,
    /// How long to wait for the server to come up. Default: "2m".
    pub start_timeout: Option<HumanDuration>,
    /// Most generations under way at once. Default: 64.
    pub max_in_flight: Option<usize>,
    /// Whether a server that does not return routed experts is refused. Default: true.
    pub require_routed_experts: Option<bool>,
}

/// A checked `[engine]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnginePlan {
    /// Base URL; `None` = the embedded engine.
    pub url: Option<String>,
    /// What the server speaks.
    pub kind: EngineKind,
    /// Folder of the starting checkpoint.
    pub model: Utf8PathBuf,
    /// Folder of the tokenizer.
    pub tokenizer: Utf8PathBuf,
    /// Environment variable of the API key.
    pub api_key_env: Option<String>,
    /// Longest time one generation may take.
    pub request_timeout: Duration,
    /// Longest time one weight update may take.
    pub sync_timeout: Duration,
    /// How long to wait for the server to come up.
    pub start_timeout: Duration,
    /// Most generations under way at once.
    pub max_in_flight: usize,
    /// Whether routed experts are required.
    pub require_routed_experts: bool,
}

impl EngineSection {
    /// Fills in defaults and checks every value. Touches neither files nor network.
    ///
    /// # Errors
    /// All problems at once.
    pub fn check(&self) -> Result<EnginePlan, Vec<ConfigProblem>> {
        let mut problems = Vec::new();
        if let Some(url) = &self.url {
            let usable = reqwest::Url::parse(url)
                .is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
            if !usable {
                let remedy = "write a URL like \"http://127.0.0.1:30000\", or leave it out for \
                              the embedded engine";
                problems.push(ConfigProblem::new("engine.url", url, remedy));
            }
        }
        let kind = check_kind(self.kind.as_deref(), self.url.is_some());
        let kind = kind.unwrap_or_else(|problem| {
            problems.push(problem);
            EngineKind::default()
        });
        let model = self.model.as_deref().filter(|model| !model.trim().is_empty());
        if model.is_none() {
            let remedy = "name the folder of the starting checkpoint (Hugging Face layout)";
            problems.push(ConfigProblem::missing("engine.model", remedy));
        }
        if let Some(name) = &self.api_key_env {
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            if name.is_empty() || !name.chars().all(word) {
                let remedy = "write the name of an environment variable, not the key itself";
                // The value may be a key that was put here by mistake: it is not repeated.
                problems.push(ConfigProblem::new("engine.api_key_env", "(not shown)", remedy));
            }
        }
        let mut time = |key: &str, value: Option<HumanDuration>, default: u64| {
            let value = value.unwrap_or(HumanDuration::secs(default));
            if value.0.is_zero() {
                problems.push(ConfigProblem::new(key, value, "use a time above 0"));
            }
            value.0
        };
        let request_timeout = time("engine.request_timeout", self.request_timeout, 20 * 60);
        let sync_timeout = time("engine.sync_timeout", self.sync_timeout, 10 * 60);
        let start_timeout = time("engine.start_timeout", self.start_timeout, 120);
        let max_in_flight = self.max_in_flight.unwrap_or(64);
        if !(1..=65_536).contains(&max_in_flight) {
            let remedy = "use a number from 1 to 65536";
            problems.push(ConfigProblem::new("engine.max_in_flight", max_in_flight, remedy));
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        let model = Utf8PathBuf::from(model.unwrap_or_default());
        Ok(EnginePlan {
            url: self.url.clone(),
            kind,
            tokenizer: self.tokenizer.as_ref().map_or_else(|| model.clone(), Utf8PathBuf::from),
            model,
            api_key_env: self.api_key_env.clone(),
            request_timeout,
            sync_timeout,
            start_timeout,
            max_in_flight,
            require_routed_experts: self.require_routed_experts.unwrap_or(true),
        })
    }
}

fn check_kind(kind: Option<&str>, has_url: bool) -> Result<EngineKind, ConfigProblem> {
    let key = "engine.kind";
    match kind {
        None | Some("sglang") => Ok(EngineKind::Sglang),
        Some("vllm") if has_url => Ok(EngineKind::Vllm),
        Some("vllm") => {
            let remedy = "set engine.url to the vLLM server: the embedded engine is \"sglang\"";
            Err(ConfigProblem::new(key, "vllm", remedy))
        }
        Some(openai @ ("openai" | "openai-chat")) => {
            let remedy = format!("OpenAI-compatible chat servers hide token ids; {NEEDED}");
            Err(ConfigProblem::new(key, openai, remedy))
        }
        Some(other) => Err(ConfigProblem::new(key, other, "use \"sglang\" or \"vllm\"")),
    }
}

impl EnginePlan {
    /// The API key from the environment; `None` where no variable is named.
    ///
    /// # Errors
    /// A [`ConfigProblem`] when the named variable is not set or empty.
    pub fn api_key(&self) -> Result<Option<String>, ConfigProblem> {
        let Some(name) = &self.api_key_env else { return Ok(None) };
        match std::env::var(name) {
            Ok(key) if !key.is_empty() => Ok(Some(key)),
            Ok(_) | Err(_) => Err(ConfigProblem::new(
                "engine.api_key_env",
                name,
                format!("set the environment variable {name} to the server's API key"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_folder_is_all_that_is_needed() {
        let section = EngineSection { model: Some("models/tiny".to_owned()), ..Default::default() };
        let plan = section.check().unwrap();
        assert_eq!((plan.url.as_deref(), plan.tokenizer.as_str()), (None, "models/tiny"));
        assert!(plan.require_routed_experts);
        assert_eq!(plan.api_key(), Ok(None));
    }

    #[test]
    fn the_kind_of_server_is_named_or_refused_with_what_would_be_needed() {
        let plan = |kind: &str, url: Option<&str>| {
            let section = EngineSection {
                kind: Some(kind.to_owned()),
                url: url.map(str::to_owned),
                model: Some("m".to_owned()),
                ..Default::default()
            };
            section.check().map(|plan| plan.kind).map_err(|problems| problems[0].to_string())
        };
        let url = Some("http://127.0.0.1:1");
        assert_eq!(plan("sglang", None), Ok(EngineKind::Sglang));
        assert_eq!(plan("vllm", url), Ok(EngineKind::Vllm));
        assert!(plan("vllm", None).unwrap_err().contains("engine.url"));
        let refused = plan("openai", url).unwrap_err();
        assert!(refused.contains("/inference/v1/generate") && refused.contains("/generate"));
        assert!(plan("triton", url).unwrap_err().contains("vllm"));
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let section = EngineSection {
            url: Some("localhost:30000".to_owned()),
            api_key_env: Some("sk-secret!".to_owned()),
            request_timeout: Some(HumanDuration::secs(0)),
            max_in_flight: Some(0),
            ..Default::default()
        };
        let problems = section.check().unwrap_err();
        let keys: Vec<&str> = problems.iter().map(|problem| problem.key.as_str()).collect();
        assert_eq!(
            keys,
            [
                "engine.url",
                "engine.model",
                "engine.api_key_env",
                "engine.request_timeout",
                "engine.max_in_flight"
            ]
        );
        assert!(problems.iter().all(|problem| !problem.remedy.is_empty()));
        assert!(problems.iter().all(|problem| !problem.to_string().contains("sk-secret")));
    }
}
