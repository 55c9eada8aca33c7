//! The section `[engine]`.

use crate::EngineKind;
use crate::capability::TRAINING_REQUIREMENTS;
use crate::chat::{ChatServerOptions, TokenLimitField};
use crate::request::MessagePrompt;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_settings::{
    Problems, TlsClientFiles, above, at_least, between, not_blank, setting_types, settings,
    variable_name,
};
use orchestrate_types::{ConfigProblem, HumanDuration};
use std::time::Duration;

/// The policy of the `micro` environment, relative to the project's root.
const MICRO_POLICY: &str = "environments/micro/policy";
const NO_TIME: HumanDuration = HumanDuration::secs(0);

setting_types!(EngineKind, TokenLimitField);

settings! {
    /// Which inference engine samples, and which model.
    #[derive(Eq)]
    [engine] pub EngineSection -> EngineSettings, check: check_together;

    /// Base URL of an inference server, e.g. `http://127.0.0.1:30000`.
    url: Option<String> = None => "the embedded engine";
    /// Kind of the server at `url`.
    kind: EngineKind = EngineKind::default();
    /// Name of the model on a server of kind `openai`, which is required there.
    served_model: Option<String> = None => "none";
    /// Field in which a server of kind `openai` reads the most tokens of a reply. `orchestrate doctor` says
    /// which one a server accepts.
    token_limit_field: TokenLimitField = TokenLimitField::default();
    /// Whether `temperature` and `top_p` are sent to a server of kind `openai`. A model with fixed sampling
    /// refuses them.
    send_sampling: bool = true;
    /// Whether a `seed`, below 2^31, is sent to a server of kind `openai`.
    send_seed: bool = true;
    /// Whether the model's thinking is sent back to a server of kind `openai`, in the fields in which it
    /// came. Some models demand it after a tool call; others refuse it.
    send_thinking: bool = false;
    /// Length in tokens of the context of a model on a server of kind `openai` that does not report it. With
    /// it, a conversation that fills the context is truncated even if the server's error has no code for it.
    context: Option<usize> = None => "as the server reports it", at_least(1);
    /// Base URLs of several servers of the same model (a fleet), instead of `url`.
    urls: Option<Vec<String>> = None => "none";
    /// Base URL of kind `http` whose host name stands for several servers, instead of `url`. The
    /// name is looked up when the run starts, and each of its addresses is one server.
    discover: Option<String> = None => "none";
    /// Folder of the starting checkpoint in Hugging Face layout (config, weights, tokenizer, chat
    /// template).
    model: Utf8PathBuf = MICRO_POLICY.into(),
        not_blank("must be the folder of the starting checkpoint (Hugging Face layout)");
    /// Folder of the tokenizer.
    tokenizer: Option<Utf8PathBuf> = None => "the folder of `model`";
    /// Name of the environment variable that holds the server's API key.
    api_key_env: Option<String> = None => "no key is sent",
        variable_name("must be the name of an environment variable, not the key itself");
    /// PEM file with the authorities whose certificates are accepted from an `https` server, instead of the
    /// system's.
    tls_ca: Option<Utf8PathBuf> = None => "the system's authorities";
    /// PEM file with the certificate that is shown to a server that asks for one (mutual TLS).
    tls_cert: Option<Utf8PathBuf> = None => "no certificate is shown";
    /// PEM file with the private key of `tls_cert`.
    tls_key: Option<Utf8PathBuf> = None => "none";
    /// Not read any more: `rollout.generate_timeout` limits a generation.
    request_timeout: HumanDuration = HumanDuration::secs(20 * 60), above(NO_TIME);
    /// Longest time one weight update may take.
    sync_timeout: HumanDuration = HumanDuration::secs(10 * 60), above(NO_TIME);
    /// Longest time to wait until the server has started.
    start_timeout: HumanDuration = HumanDuration::secs(120), above(NO_TIME);
    /// Maximum number of generations that run at the same time on each server.
    max_in_flight: usize = 64, between(1, 65_536);
    /// Time between two health checks of a server; three that fail take it out of service.
    probe_interval: HumanDuration = HumanDuration::secs(10), above(NO_TIME);
    /// Longest time calls wait while every server is out of service.
    out_of_service_timeout: HumanDuration = HumanDuration::secs(10 * 60), above(NO_TIME);
    /// Whether a server that does not return routed experts is refused.
    require_routed_experts: bool = true;
}

fn check_together(written: &EngineSection, settings: &EngineSettings, problems: &mut Problems) {
    check_servers(settings, problems);
    let servers = settings.servers();
    let urls = servers.iter().map(String::as_str).chain(settings.discover.as_deref());
    settings.tls().check(urls, problems);
    let has_url = !settings.servers().is_empty() || settings.discover.is_some();
    let kind = settings.kind;
    let served = settings.served_model.as_deref();
    match kind {
        EngineKind::Vllm | EngineKind::Openai if !has_url => {
            let remedy = "must be \"sglang\" without engine.url: that is the embedded engine";
            problems.refuse("kind", kind, remedy);
        }
        EngineKind::Sglang | EngineKind::Vllm | EngineKind::Openai => {}
    }
    if kind == EngineKind::Openai && served.is_none_or(|name| name.trim().is_empty()) {
        let remedy = "must be the model's name on the chat server (see its /v1/models)";
        problems.missing("served_model", remedy);
    }
    refuse_unread(written, kind, problems);
    let keys = ["request_timeout"];
    problems.refuse_unread(written, &keys, "is not read any more: see rollout.generate_timeout");
    if !has_url {
        let keys = ["api_key_env", "tls_ca", "tls_cert", "tls_key", "require_routed_experts"];
        let why = "only applies with an inference server, not with the embedded engine";
        problems.refuse_unread(written, &keys, why);
    }
    if kind == EngineKind::Openai && written.tokenizer.is_none() && written.model.is_none() {
        let remedy = "must be a folder with a tokenizer and a chat template, ideally the served \
                      model's: it counts the tokens of what a chat server writes";
        problems.missing("tokenizer", remedy);
    }
}

/// Keys that are only read for some kinds of servers, and these kinds.
const READ_BY: [(&[&str], &[EngineKind]); 2] = [
    (
        &[
            "served_model",
            "token_limit_field",
            "send_sampling",
            "send_seed",
            "send_thinking",
            "context",
        ],
        &[EngineKind::Openai],
    ),
    (&["sync_timeout", "require_routed_experts"], &[EngineKind::Sglang, EngineKind::Vllm]),
];

fn refuse_unread(written: &EngineSection, kind: EngineKind, problems: &mut Problems) {
    for (keys, kinds) in READ_BY.iter().filter(|(_, kinds)| !kinds.contains(&kind)) {
        let kinds: Vec<String> = kinds.iter().map(|kind| format!("\"{kind}\"")).collect();
        let why = format!("only applies with engine.kind = {}", kinds.join(" or "));
        problems.refuse_unread(written, keys, &why);
    }
}

fn check_servers(settings: &EngineSettings, problems: &mut Problems) {
    let EngineSettings { url, urls, discover, .. } = settings;
    if let (Some(url), Some(_)) = (url, urls) {
        problems.refuse("url", url, "must be part of engine.urls when that is set");
    }
    if let Some(name) = discover {
        if url.is_some() || urls.is_some() {
            let remedy = "must be the only one of engine.url, engine.urls and engine.discover";
            problems.refuse("discover", name, remedy);
        } else if !is_url(name, &["http"]) {
            problems.refuse(
                "discover",
                name,
                "must be a URL like \"http://engines.example:30000\"",
            );
        }
    }
    let mut known: Vec<&str> = Vec::new();
    let listed = urls.iter().flatten().map(|url| ("urls", url));
    for (key, url) in url.iter().map(|url| ("url", url)).chain(listed) {
        let base = url.trim_end_matches('/');
        if !is_url(url, &["http", "https"]) {
            let remedy = "must be a URL like \"http://127.0.0.1:30000\"; leave it out for the \
                          embedded engine";
            problems.refuse(key, url, remedy);
        } else if known.contains(&base) {
            problems.refuse(key, url, "must name each server once");
        } else {
            known.push(base);
        }
    }
    if urls.as_ref().is_some_and(Vec::is_empty) {
        let remedy = "must name at least one server; leave it out for the embedded engine";
        problems.refuse("urls", "[]", remedy);
    }
}

fn is_url(url: &str, schemes: &[&str]) -> bool {
    reqwest::Url::parse(url).is_ok_and(|url| schemes.contains(&url.scheme()) && url.has_host())
}

impl EngineSettings {
    /// Base URLs of the servers that are named, without a slash at the end, which is how their
    /// replies name them. Empty for the embedded engine, and with [`discover`](Self::discover).
    pub fn servers(&self) -> Vec<String> {
        let named = self.url.iter().chain(self.urls.iter().flatten());
        named.map(|url| url.trim_end_matches('/').to_owned()).collect()
    }

    /// Whether the engine inside this program samples.
    pub fn is_embedded(&self) -> bool {
        self.servers().is_empty() && self.discover.is_none()
    }

    /// How requests to a chat server differ from the common form, for a run that samples with
    /// `temperature` and `top_p`, up to `max_tokens` tokens at once and for at most `deadline`, from prompts
    /// like `prompt`.
    pub fn chat_server_options(
        &self,
        (temperature, top_p): (f32, f32),
        (max_tokens, deadline): (usize, Duration),
        prompt: MessagePrompt,
    ) -> ChatServerOptions {
        ChatServerOptions {
            token_limit_field: self.token_limit_field,
            send_sampling: self.send_sampling,
            send_seed: self.send_seed,
            send_thinking: self.send_thinking,
            context: self.context,
            temperature,
            top_p,
            max_tokens,
            prompt,
            deadline,
        }
    }

    /// Folder of the tokenizer.
    pub fn tokenizer_folder(&self) -> &Utf8Path {
        self.tokenizer.as_ref().unwrap_or(&self.model)
    }

    /// Checks that a run can train with what these servers return.
    ///
    /// # Errors
    /// For chat servers, with what training needs.
    pub fn check_training(&self) -> Result<(), ConfigProblem> {
        if self.kind != EngineKind::Openai {
            return Ok(());
        }
        let remedy = format!(
            "OpenAI-compatible chat servers hide token ids: `orchestrate eval` can measure them, \
             but {TRAINING_REQUIREMENTS}"
        );
        Err(ConfigProblem::new("engine.kind", self.kind, remedy))
    }

    /// The files of `tls_ca`, `tls_cert` and `tls_key`.
    pub fn tls(&self) -> TlsClientFiles {
        let Self { tls_ca: ca, tls_cert: certificate, tls_key: key, .. } = self.clone();
        TlsClientFiles { ca, certificate, key }
    }

    /// The API key from the environment; `None` if no variable is named.
    ///
    /// # Errors
    /// If the named variable is not set, or empty.
    pub fn api_key(&self) -> Result<Option<String>, ConfigProblem> {
        let Some(name) = &self.api_key_env else { return Ok(None) };
        match std::env::var(name) {
            Ok(key) if !key.is_empty() => Ok(Some(key)),
            Ok(_) | Err(_) => Err(ConfigProblem::new(
                "engine.api_key_env",
                name,
                format!("the environment variable {name} must hold the server's API key"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_settings::SectionKeys as _;

    #[test]
    fn tokenizer_is_the_models_unless_it_is_named() {
        let section = EngineSection { model: Some("models/tiny".to_owned()), ..Default::default() };
        let plan = section.check().unwrap();
        assert_eq!((plan.servers().len(), plan.tokenizer_folder().as_str()), (0, "models/tiny"));
        assert!(plan.require_routed_experts);
        assert_eq!(plan.api_key(), Ok(None));
    }

    #[test]
    fn servers_of_other_kinds_need_a_url() {
        let plan = |kind: EngineKind, url: Option<&str>| {
            let section = EngineSection {
                kind: Some(kind),
                url: url.map(str::to_owned),
                model: Some("m".to_owned()),
                ..Default::default()
            };
            section.check().map(|plan| plan.kind).map_err(|problems| problems[0].to_string())
        };
        let url = Some("http://127.0.0.1:1");
        assert_eq!(plan(EngineKind::Sglang, None), Ok(EngineKind::Sglang));
        assert_eq!(plan(EngineKind::Vllm, url), Ok(EngineKind::Vllm));
        assert!(plan(EngineKind::Vllm, None).unwrap_err().contains("engine.url"));
        assert!(plan(EngineKind::Openai, url).unwrap_err().contains("engine.served_model"));
        assert!(plan(EngineKind::Openai, None).unwrap_err().contains("engine.url"));
    }

    #[test]
    fn chat_servers_need_a_model_name_and_cannot_train() {
        let section = |kind| EngineSection {
            kind: Some(kind),
            url: Some("http://127.0.0.1:1/v1".to_owned()),
            model: Some("m".to_owned()),
            served_model: Some("coder".to_owned()),
            ..Default::default()
        };
        let plan = section(EngineKind::Openai).check().unwrap();
        assert_eq!((plan.kind, plan.served_model.as_deref()), (EngineKind::Openai, Some("coder")));
        let refused = plan.check_training().unwrap_err().to_string();
        for text in ["orchestrate eval", "/inference/v1/generate", "/generate"] {
            assert!(refused.contains(text), "{refused}");
        }
        let named = section(EngineKind::Vllm).check().unwrap_err();
        assert_eq!(named[0].key, "engine.served_model");
        let plan =
            EngineSection { served_model: None, ..section(EngineKind::Vllm) }.check().unwrap();
        assert_eq!(plan.check_training(), Ok(()));
    }

    #[test]
    fn keys_that_the_kind_does_not_read_are_refused_by_name() {
        let url = Some("http://127.0.0.1:1".to_owned());
        let chat = EngineSection {
            kind: Some(EngineKind::Openai),
            url: url.clone(),
            model: Some("m".to_owned()),
            served_model: Some("coder".to_owned()),
            token_limit_field: Some(TokenLimitField::MaxCompletionTokens),
            send_sampling: Some(false),
            send_seed: Some(false),
            send_thinking: Some(true),
            context: Some(4096),
            ..Default::default()
        };
        assert_eq!(chat.check().unwrap().context, Some(4096));
        let tokens = EngineSection {
            url,
            model: Some("m".to_owned()),
            sync_timeout: Some(HumanDuration::secs(5)),
            require_routed_experts: Some(false),
            ..Default::default()
        };
        for kind in [EngineKind::Sglang, EngineKind::Vllm] {
            let plan = EngineSection { kind: Some(kind), ..tokens.clone() }.check().unwrap();
            // As a resumed run has it: every key is written out.
            assert_eq!(EngineSection::from_values(&plan).check(), Ok(plan));
        }
        let plan = chat.check().unwrap();
        assert_eq!(EngineSection::from_values(&plan).check(), Ok(plan));
        let refused = |section: &EngineSection| -> Vec<String> {
            let problems = section.check().unwrap_err();
            assert!(problems.iter().all(|problem| problem.remedy.contains("only applies with")));
            problems.into_iter().map(|problem| problem.key).collect()
        };
        let unread = |index: usize| -> Vec<String> {
            READ_BY[index].0.iter().map(|key| format!("engine.{key}")).collect()
        };
        for kind in [EngineKind::Sglang, EngineKind::Vllm] {
            assert_eq!(refused(&EngineSection { kind: Some(kind), ..chat.clone() }), unread(0));
        }
        let both = EngineSection {
            sync_timeout: tokens.sync_timeout,
            require_routed_experts: tokens.require_routed_experts,
            ..chat
        };
        assert_eq!(refused(&both), unread(1));
    }

    #[test]
    fn each_server_is_named_once() {
        let section = |url: Option<&str>, urls: Option<&[&str]>| EngineSection {
            model: Some("m".to_owned()),
            url: url.map(ToOwned::to_owned),
            urls: urls.map(|urls| urls.iter().map(|url| (*url).to_owned()).collect()),
            ..Default::default()
        };
        let one = section(Some("http://a:1/"), None).check().unwrap();
        assert_eq!(one.servers(), ["http://a:1"]);
        let two = section(None, Some(&["http://a:1", "http://b:1"])).check().unwrap();
        assert_eq!(two.servers(), ["http://a:1", "http://b:1"]);
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
            model: Some(" ".to_owned()),
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
                "engine.model",
                "engine.api_key_env",
                "engine.request_timeout",
                "engine.max_in_flight",
                "engine.url"
            ]
        );
        assert!(problems.iter().all(|problem| !problem.remedy.is_empty()));
        assert!(problems.iter().all(|problem| !problem.to_string().contains("sk-secret")));
    }
}
