//! Which kind of server, chosen by settings, behind one type.

use crate::client::await_start;
use crate::dialect::Dialect;
use crate::http::Wire;
use crate::{
    ChatClient, Client, ClientOptions, Engine, EngineError, EngineErrorKind, EngineInfo,
    ProbeReport, Sglang, Vllm,
};
use async_trait::async_trait;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The dialect of an inference server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// SGLang 0.5.12 and later, and the embedded engine.
    #[default]
    Sglang,
    /// vLLM 0.31 and later.
    Vllm,
    /// OpenAI-compatible chat server (`/v1/chat/completions`), for evaluation only.
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

/// What training needs of a server, for a person who has another one.
pub(crate) const NEEDED: &str = "training needs the ids and log-probs of the sampled tokens and \
     the routed experts: SGLang 0.5.12 or later (/generate, --enable-return-routed-experts), or \
     vLLM 0.31 or later (/inference/v1/generate, --enable-scale-out, \
     --enable-return-routed-experts, VLLM_SERVER_DEV_MODE=1)";

/// One server, with what only a server of its own can be asked.
#[async_trait]
pub trait Worker: Engine {
    /// As [`Client::probe`].
    async fn probe(&self) -> Result<ProbeReport, EngineError>;
}

#[async_trait]
impl<D: Dialect> Worker for Client<D> {
    async fn probe(&self) -> Result<ProbeReport, EngineError> {
        Self::probe(self).await
    }
}

impl EngineKind {
    /// A client that is not connected yet.
    ///
    /// # Errors
    /// As [`Client::new`].
    pub fn client(self, options: ClientOptions) -> Result<Arc<dyn Worker>, EngineError> {
        Ok(match self {
            Self::Sglang => Arc::new(Client::<Sglang>::new(options)?),
            Self::Vllm => Arc::new(Client::<Vllm>::new(options)?),
            Self::Openai => Arc::new(ChatClient::new(options)?),
        })
    }

    /// As [`Client::connect`]. A server of another kind is refused with its name.
    ///
    /// # Errors
    /// As [`Client::connect`], and [`EngineErrorKind::Unfit`] for a server of another kind.
    pub async fn connect(
        self,
        options: ClientOptions,
        patience: Duration,
    ) -> Result<(Arc<dyn Worker>, EngineInfo), EngineError> {
        let (url, api_key) = (options.url.clone(), options.api_key.clone());
        let connected: Result<(Arc<dyn Worker>, EngineInfo), EngineError> = match self {
            Self::Sglang => Client::<Sglang>::connect(options, patience)
                .await
                .map(|(client, info)| (Arc::new(client) as Arc<dyn Worker>, info)),
            Self::Vllm => Client::<Vllm>::connect(options, patience)
                .await
                .map(|(client, info)| (Arc::new(client) as Arc<dyn Worker>, info)),
            Self::Openai => {
                let client = ChatClient::new(options)?;
                let info = await_start(&client, patience).await?;
                return Ok((Arc::new(client), info));
            }
        };
        match connected {
            Err(error) if may_be_another(&error.kind) => {
                Err(self.explain(&url, api_key.as_deref()).await.unwrap_or(error))
            }
            connected => connected,
        }
    }

    /// What a server is that does not answer as this kind does.
    async fn explain(self, url: &str, api_key: Option<&str>) -> Option<EngineError> {
        let wire = Wire::new(url, api_key).ok()?;
        let words = match identify(&wire).await.ok()? {
            Identity::Known(kind) if kind == self => return None,
            Identity::Known(kind) => format!("it is no {self}: set engine.kind = \"{kind}\""),
            Identity::Chat => chat_only(),
            Identity::Stranger => format!("it is no inference server that is known here; {NEEDED}"),
        };
        Some(wire.error("look", EngineErrorKind::Unfit(words)))
    }

    /// Finds out what answers at a URL.
    ///
    /// # Errors
    /// When nothing answers, or nothing that training could use.
    pub async fn detect(url: &str, api_key: Option<&str>) -> Result<Self, EngineError> {
        let wire = Wire::new(url, api_key)?;
        let words = match identify(&wire).await? {
            Identity::Known(kind) => return Ok(kind),
            Identity::Chat => chat_only(),
            Identity::Stranger => format!("it is no inference server that is known here; {NEEDED}"),
        };
        Err(wire.error("look", EngineErrorKind::Unfit(words)))
    }
}

/// To a person with a chat server.
fn chat_only() -> String {
    format!(
        "it speaks only the OpenAI-compatible form, by which `orchestrate eval` can measure it \
         (engine.kind = \"openai\"); {NEEDED}"
    )
}

/// Whether an error may mean that another kind of server answers.
fn may_be_another(kind: &EngineErrorKind) -> bool {
    match kind {
        EngineErrorKind::Refused { status, .. } => matches!(status, 404 | 405 | 501),
        EngineErrorKind::InvalidReply(_) => true,
        EngineErrorKind::Unreachable(_)
        | EngineErrorKind::TimedOut(_)
        | EngineErrorKind::Unfit(_) => false,
    }
}

enum Identity {
    Known(EngineKind),
    /// An OpenAI-compatible server: text in, text out.
    Chat,
    Stranger,
}

/// Both have `/server_info`, but only SGLang's is the server's own arguments; `/version` is
/// vLLM's.
async fn identify(wire: &Wire) -> Result<Identity, EngineError> {
    let known = |answer: Result<Option<Value>, EngineError>| match answer {
        // Not JSON: not the route that is meant.
        Err(EngineError { kind: EngineErrorKind::InvalidReply(_), .. }) => Ok(None),
        answer => answer,
    };
    let server = known(wire.ask_if_known("/server_info").await)?;
    if server.is_some_and(|server| server.get("model_path").is_some()) {
        return Ok(Identity::Known(EngineKind::Sglang));
    }
    let version = known(wire.ask_if_known("/version").await)?;
    if version.is_some_and(|version| version.get("version").is_some()) {
        return Ok(Identity::Known(EngineKind::Vllm));
    }
    let models = known(wire.ask_if_known("/v1/models").await)?;
    let chat = models.is_some_and(|models| models.get("data").is_some_and(Value::is_array));
    Ok(if chat { Identity::Chat } else { Identity::Stranger })
}
