//! The kind of an inference server, which settings name.

use crate::api::EngineInfo;
use crate::capability::{TRAINING_REQUIREMENTS, Worker};
use crate::chat::ChatClient;
use crate::client::{Client, ClientOptions, wait_for_start};
use crate::error::{EngineError, EngineErrorKind};
use crate::http::Server;
use crate::sglang::Sglang;
use crate::vllm::Vllm;
use orchestrate_settings::TlsClientPem;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The kind of an inference server: an engine family, or the chat API.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// SGLang 0.5.12 and later, and the embedded engine.
    #[default]
    Sglang,
    /// vLLM 0.31 and later.
    Vllm,
    /// The OpenAI-compatible chat API, for evaluation only.
    Openai,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sglang => "sglang",
            Self::Vllm => "vllm",
            Self::Openai => "openai",
        })
    }
}

impl EngineKind {
    /// A client, which connects on the first call.
    ///
    /// # Errors
    /// Those of [`Client::new`].
    pub fn client(self, options: ClientOptions) -> Result<Arc<dyn Worker>, EngineError> {
        Ok(match self {
            Self::Sglang => Arc::new(Client::<Sglang>::new(options)?),
            Self::Vllm => Arc::new(Client::<Vllm>::new(options)?),
            Self::Openai => Arc::new(ChatClient::new(options)?),
        })
    }

    /// Like [`Client::connect`]. The error for a server of another kind names that kind.
    ///
    /// # Errors
    /// Those of [`Client::connect`], and [`EngineErrorKind::Unsupported`] for a server of another
    /// kind.
    pub async fn connect(
        self,
        options: ClientOptions,
        start_timeout: Duration,
    ) -> Result<(Arc<dyn Worker>, EngineInfo), EngineError> {
        let (url, api_key) = (options.url.clone(), options.api_key.clone());
        let tls = options.tls.clone();
        let connected: Result<(Arc<dyn Worker>, EngineInfo), EngineError> = match self {
            Self::Sglang => Client::<Sglang>::connect(options, start_timeout)
                .await
                .map(|(client, info)| (Arc::new(client) as Arc<dyn Worker>, info)),
            Self::Vllm => Client::<Vllm>::connect(options, start_timeout)
                .await
                .map(|(client, info)| (Arc::new(client) as Arc<dyn Worker>, info)),
            Self::Openai => {
                let client = ChatClient::new(options)?;
                let info = wait_for_start(&client, start_timeout).await?;
                return Ok((Arc::new(client), info));
            }
        };
        match connected {
            Err(error) if may_be_another_kind(&error.kind) => {
                Err(self.explain(&url, api_key.as_deref(), &tls).await.unwrap_or(error))
            }
            connected => connected,
        }
    }

    /// The error for a server that does not answer like this kind; `None` if it is of this kind
    /// after all, or cannot be asked.
    async fn explain(
        self,
        url: &str,
        api_key: Option<&str>,
        tls: &TlsClientPem,
    ) -> Option<EngineError> {
        let server = Server::new(url, api_key, tls).ok()?;
        let message = match identify(&server).await.ok()? {
            Identity::Known(kind) if kind == self => return None,
            Identity::Known(kind) => {
                format!("a {kind} server, not {self}; set engine.kind = \"{kind}\"")
            }
            Identity::ChatOnly => chat_only(),
            Identity::Unknown => not_recognised(),
        };
        Some(server.error("probe", EngineErrorKind::unsupported(message)))
    }

    /// Finds out which kind of server answers at a URL.
    ///
    /// # Errors
    /// If nothing answers, or if the server cannot be trained with.
    pub async fn detect(
        url: &str,
        api_key: Option<&str>,
        tls: &TlsClientPem,
    ) -> Result<Self, EngineError> {
        let server = Server::new(url, api_key, tls)?;
        let message = match identify(&server).await? {
            Identity::Known(kind) => return Ok(kind),
            Identity::ChatOnly => chat_only(),
            Identity::Unknown => not_recognised(),
        };
        Err(server.error("probe", EngineErrorKind::unsupported(message)))
    }
}

fn not_recognised() -> String {
    format!("not recognised as an SGLang or vLLM server; {TRAINING_REQUIREMENTS}")
}

fn chat_only() -> String {
    format!(
        "only has the OpenAI-compatible chat API, which `orchestrate eval` can evaluate \
         (engine.kind = \"openai\"); {TRAINING_REQUIREMENTS}"
    )
}

/// Whether an error may mean that the server is of another kind.
fn may_be_another_kind(kind: &EngineErrorKind) -> bool {
    match kind {
        EngineErrorKind::Refused { status, .. } => matches!(status, 404 | 405 | 501),
        EngineErrorKind::InvalidReply(_) => true,
        EngineErrorKind::Unreachable(_)
        | EngineErrorKind::TimedOut(_)
        | EngineErrorKind::ContextFull(_)
        | EngineErrorKind::GenerationFailed(_)
        | EngineErrorKind::Unsupported(_) => false,
    }
}

enum Identity {
    Known(EngineKind),
    /// An OpenAI-compatible server without a route for tokens.
    ChatOnly,
    Unknown,
}

/// Identifies a server by its routes. SGLang and vLLM both have `/server_info`, but only SGLang's has
/// `model_path`; only vLLM has `/version`.
async fn identify(server: &Server) -> Result<Identity, EngineError> {
    let json = |reply: Result<Option<Value>, EngineError>| match reply {
        // A reply that is not JSON comes from a different route of the same name.
        Err(EngineError { kind: EngineErrorKind::InvalidReply(_), .. }) => Ok(None),
        reply => reply,
    };
    let info = json(server.get_json_if_supported("/server_info").await)?;
    if info.is_some_and(|info| info.get("model_path").is_some()) {
        return Ok(Identity::Known(EngineKind::Sglang));
    }
    let version = json(server.get_json_if_supported("/version").await)?;
    if version.is_some_and(|version| version.get("version").is_some()) {
        return Ok(Identity::Known(EngineKind::Vllm));
    }
    let models = json(server.get_json_if_supported("/v1/models").await)?;
    let chat = models.is_some_and(|models| models.get("data").is_some_and(Value::is_array));
    Ok(if chat { Identity::ChatOnly } else { Identity::Unknown })
}
