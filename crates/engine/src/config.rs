//! The section `[engine]`.

use crate::EngineKind;
use crate::capability::TRAINING_REQUIREMENTS;
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
    /// What the server at `url` speaks: "sglang" (0.5.12 and later, the default), "vllm" (0.31
    /// and later), or, for evaluation only, "openai" (`/v1/chat/completions`).
    pub kind: Option<String>,
    /// Name of the model at a server of kind "openai".
    pub served_model: Option<String>,
    /// Base URLs of several servers of the same model: a fleet. Instead of `url`.
    pub urls: Option<Vec<String>>,
    /// Base URL whose host name stands for several servers: each of its addresses is one, looked
    /// up when the run starts. `http` only. Instead of `url`.
    pub discover: Option<String>,
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
    /// Most generations under way at once, on each server. Default: 64.
    pub max_in_flight: Option<usize>,
    /// Time between two looks at a server; three without an answer take it out. Default: "10s".
    pub probe_interval: Option<HumanDuration>,
    /// How long calls wait for a server while none is up. Default: "10m".
    pub away_timeout: Option<HumanDuration>,
    /// Whether a server that does not return routed experts is refused. Default: true.
    pub require_routed_experts: Option<bool>,
}

/// A checked `[engine]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnginePlan {
    /// Base URLs of the servers, all different; none = the embedded engine.
    pub urls: Vec<String>,
    /// Base URL whose host name stands for the servers.
    pub discover: Option<String>,
    /// What the servers speak.
    pub kind: EngineKind,
    /// Name of the model there; only a server of kind `openai` is asked by it.
    pub served_model: Option<String>,
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
    /// Most generations under way at once, on each server.
    pub max_in_flight: usize,
    /// Time between two looks at a server.
    pub probe_interval: Duration,
    /// How long calls wait for a server while none is up.
    pub away_timeout: Duration,
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
        let urls = self.check_urls(&mut problems);
        let kind = check_kind(self.kind.as_deref(), !urls.is_empty() || self.discover.is_some());
        let kind = kind.unwrap_or_else(|problem| {
            problems.push(problem);
            EngineKind::default()
        });
        let served = self.served_model.as_deref().filter(|name| !name.trim().is_empty());
        match (kind, &self.served_model) {
            (EngineKind::Openai, _) if served.is_none() => {
                let remedy = "name the model as the chat server names it (see its /v1/models)";
                problems.push(ConfigProblem::missing("engine.served_model", remedy));
            }
            (EngineKind::Sglang | EngineKind::Vllm, Some(name)) => {
                let remedy = "leave it out: only kind \"openai\" is asked for a model by name";
                problems.push(ConfigProblem::new("engine.served_model", name, remedy));
            }
            (EngineKind::Openai, _) | (EngineKind::Sglang | EngineKind::Vllm, None) => {}
        }
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
        let probe_interval = time("engine.probe_interval", self.probe_interval, 10);
        let away_timeout = time("engine.away_timeout", self.away_timeout, 10 * 60);
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
            urls,
            discover: self.discover.clone(),
            kind,
            served_model: self.served_model.clone(),
            tokenizer: self.tokenizer.as_ref().map_or_else(|| model.clone(), Utf8PathBuf::from),
            model,
            api_key_env: self.api_key_env.clone(),
            request_timeout,
            sync_timeout,
            start_timeout,
            max_in_flight,
            probe_interval,
            away_timeout,
            require_routed_experts: self.require_routed_experts.unwrap_or(true),
        })
    }

    /// The servers' URLs without a slash at the end, which is how their replies name them.
    fn check_urls(&self, problems: &mut Vec<ConfigProblem>) -> Vec<String> {
        if let (Some(url), Some(_)) = (&self.url, &self.urls) {
            let remedy = "put it into engine.urls, and leave engine.url out";
            problems.push(ConfigProblem::new("engine.url", url, remedy));
        }
        if let Some(url) = &self.discover {
            if self.url.is_some() || self.urls.is_some() {
                let remedy = "name servers by engine.url, by engine.urls or by this, not by two";
                problems.push(ConfigProblem::new("engine.discover", url, remedy));
            } else if !reqwest::Url::parse(url).is_ok_and(|u| u.scheme() == "http" && u.has_host())
            {
                let remedy = "write a URL like \"http://engines.example:30000\"";
                problems.push(ConfigProblem::new("engine.discover", url, remedy));
            }
        }
        let listed = self.urls.iter().flatten().map(|url| ("engine.urls", url));
        let mut urls: Vec<String> = Vec::new();
        for (key, url) in self.url.iter().map(|url| ("engine.url", url)).chain(listed) {
            let usable = reqwest::Url::parse(url)
                .is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
            let base = url.trim_end_matches('/').to_owned();
            if !usable {
                let remedy = "write a URL like \"http://127.0.0.1:30000\", or leave it out for \
                              the embedded engine";
                problems.push(ConfigProblem::new(key, url, remedy));
            } else if urls.contains(&base) {
                problems.push(ConfigProblem::new(key, url, "name each server once"));
            } else {
                urls.push(base);
            }
        }
        if self.urls.as_ref().is_some_and(Vec::is_empty) {
            let remedy = "name at least one server, or leave it out for the embedded engine";
            problems.push(ConfigProblem::new("engine.urls", "[]", remedy));
        }
        urls
    }
}

fn check_kind(kind: Option<&str>, has_url: bool) -> Result<EngineKind, ConfigProblem> {
    let key = "engine.kind";
    match kind {
        None | Some("sglang") => Ok(EngineKind::Sglang),
        Some("vllm") if has_url => Ok(EngineKind::Vllm),
        Some("openai") if has_url => Ok(EngineKind::Openai),
        Some(kind @ ("vllm" | "openai")) => {
            let remedy = "set engine.url to the server: the embedded engine is \"sglang\"";
            Err(ConfigProblem::new(key, kind, remedy))
        }
        Some(other) => {
            let remedy = "use \"sglang\", \"vllm\" or, for evaluation only, \"openai\"";
            Err(ConfigProblem::new(key, other, remedy))
        }
    }
}

impl EnginePlan {
    /// Whether a run can train with what these servers return.
    ///
    /// # Errors
    /// A [`ConfigProblem`] with what would be needed, for chat servers.
    pub fn check_training(&self) -> Result<(), ConfigProblem> {
        if self.kind != EngineKind::Openai {
            return Ok(());
        }
        let remedy = format!(
            "OpenAI-compatible chat servers hide token ids: `orchestrate eval` can measure them, and \
             {TRAINING_REQUIREMENTS}"
        );
        Err(ConfigProblem::new("engine.kind", self.kind, remedy))
    }

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
        assert_eq!((plan.urls.len(), plan.tokenizer.as_str()), (0, "models/tiny"));
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
        assert!(plan("openai", url).unwrap_err().contains("engine.served_model"));
        assert!(plan("openai", None).unwrap_err().contains("engine.url"));
        assert!(plan("triton", url).unwrap_err().contains("vllm"));
    }

    #[test]
    fn a_chat_server_is_for_evaluation_only_and_asked_by_name() {
        let section = |kind: &str| EngineSection {
            kind: Some(kind.to_owned()),
            url: Some("http://127.0.0.1:1/v1".to_owned()),
            model: Some("m".to_owned()),
            served_model: Some("coder".to_owned()),
            ..Default::default()
        };
        let plan = section("openai").check().unwrap();
        assert_eq!((plan.kind, plan.served_model.as_deref()), (EngineKind::Openai, Some("coder")));
        let refused = plan.check_training().unwrap_err().to_string();
        for words in ["orchestrate eval", "/inference/v1/generate", "/generate"] {
            assert!(refused.contains(words), "{refused}");
        }
        let named = section("vllm").check().unwrap_err();
        assert_eq!(named[0].key, "engine.served_model");
        let plan = EngineSection { served_model: None, ..section("vllm") }.check().unwrap();
        assert_eq!(plan.check_training(), Ok(()));
    }

    #[test]
    fn servers_are_one_or_many_and_each_is_named_once() {
        let section = |url: Option<&str>, urls: Option<&[&str]>| EngineSection {
            model: Some("m".to_owned()),
            url: url.map(ToOwned::to_owned),
            urls: urls.map(|urls| urls.iter().map(|url| (*url).to_owned()).collect()),
            ..Default::default()
        };
        let one = section(Some("http://a:1/"), None).check().unwrap();
        assert_eq!(one.urls, ["http://a:1"]);
        let two = section(None, Some(&["http://a:1", "http://b:1"])).check().unwrap();
        assert_eq!(two.urls, ["http://a:1", "http://b:1"]);
        for wrong in [
            section(Some("http://a:1"), Some(&["http://b:1"])),
            section(None, Some(&["http://a:1", "http://a:1/"])),
            section(None, Some(&["b:1"])),
            section(None, Some(&[])),
            EngineSection {
                discover: Some("http://c:1".to_owned()),
                ..section(Some("http://a:1"), None)
            },
            EngineSection { discover: Some("https://c:1".to_owned()), ..section(None, None) },
        ] {
            assert_eq!(wrong.check().unwrap_err().len(), 1, "{wrong:?}");
        }
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
