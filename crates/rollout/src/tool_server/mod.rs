//! Tool servers: tools of the scaffold `tools` that are called over the Model Context Protocol (MCP).
//!
//! The servers list their tools once when a run starts, and the schemas become part of every prompt.
//! Each attempt opens a session of its own with each server, so that no attempt sees what another one
//! left there, and checks that the tools are still the same: the prompts of a group must be equal.
//!
//! The invariant: whatever a call of the policy can cause is an observation, a time-out included. A server
//! that is gone is a failure of the infrastructure.

mod config;
mod list;
mod session;

pub(crate) use config::check as check_settings;
pub use config::{ToolServerSection, ToolServerSettings};
use list::ServerTool;
pub(crate) use list::called;
use orchestrate_types::without_credentials;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use rmcp::service::{ClientInitializeError, ServiceError};
use serde_json::{Map, Value};
use session::Session;
use std::collections::BTreeMap;
use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Tools of all servers of a run.
const MAX_TOOLS: usize = 128;

/// Size of all their schemas, in bytes of JSON.
const MAX_SCHEMA_BYTES: usize = 256 << 10;

/// Time to set up a connection.
const CONNECT_TIME: Duration = Duration::from_secs(10);

/// Why a tool server cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ToolServerErrorKind {
    /// The token is missing.
    #[error(
        "has no token: the environment variable {0}, named in token_env, must hold a token that \
         can be sent in an HTTP header"
    )]
    Token(String),
    /// No HTTP client could be made.
    #[error("cannot be called: the HTTP client cannot be set up")]
    Client(#[source] reqwest::Error),
    /// No session could be opened in time.
    #[error(
        "did not open a session and list its tools within {0:?}; check that it runs, or set a longer \
         timeout"
    )]
    TimedOut(Duration),
    /// No session could be opened.
    #[error(
        "refused a session; check that it runs, that its url is that of its streamable HTTP endpoint, \
         and token_env if it requires a token"
    )]
    Connect(#[source] Box<ClientInitializeError>),
    /// Its tools could not be listed.
    #[error("did not list its tools")]
    List(#[source] Box<ServiceError>),
    /// Its list has no end.
    #[error("lists more tools than can be read")]
    LongList,
    /// The tools of all servers are too many, or too large for a prompt.
    #[error(
        "lists too many tools: with those of the servers before it they must be at most {MAX_TOOLS}, \
         with schemas of at most {MAX_SCHEMA_BYTES} bytes; name the tools that are needed in tools"
    )]
    TooManyTools,
    /// A tool that the settings name does not exist.
    #[error("has no tool `{missing}`, which is named in tools; it lists {listed}")]
    MissingTool {
        /// Its name.
        missing: String,
        /// Names of the tools that exist.
        listed: String,
    },
    /// A tool cannot be shown to a policy.
    #[error("lists the tool `{tool}`, which {problem}; leave it out by naming the others in tools")]
    InvalidTool {
        /// The server's name of the tool.
        tool: String,
        /// Why it cannot be shown.
        problem: &'static str,
    },
    /// It lists other tools than before.
    #[error(
        "changed its tools since the run began ({0}), so prompts would differ; restore them, or start \
         a new run"
    )]
    Changed(String),
    /// The record of its tools cannot be read.
    #[error(
        "cannot be compared with the tools that the run began with: their record is damaged ({0}); \
         restore it, or start a new run"
    )]
    Record(String),
    /// It stopped answering during a call.
    #[error("stopped answering during a call of {tool}")]
    Gone {
        /// The server's name of the tool.
        tool: String,
        /// What was seen of it.
        #[source]
        source: Box<ServiceError>,
    },
    /// A call names a tool that the server does not have: a bug.
    #[error("has no tool {0}")]
    Unknown(String),
}

/// A tool server cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("tool server {server} ({url}) {kind}")]
pub struct ToolServerError {
    /// Its name.
    pub server: String,
    /// Its address, without secrets.
    pub url: String,
    /// The kind of error, with its details.
    #[source]
    pub kind: ToolServerErrorKind,
}

impl ToolServerError {
    /// The message with those of its causes, which may name the whole address.
    pub(crate) fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.kind.source();
        while let Some(error) = cause {
            let message = error.to_string();
            if !text.contains(&message) {
                text = format!("{text}: {message}");
            }
            cause = error.source();
        }
        without_credentials(&text).into_owned()
    }
}

/// The tool servers of a run, and the tools that they listed when it started.
#[derive(Debug, Default)]
pub struct ToolServers {
    servers: Vec<ToolServer>,
    schemas: Vec<Value>,
}

/// One server.
#[derive(Debug)]
struct ToolServer {
    settings: ToolServerSettings,
    /// Sends the token with each request.
    http: reqwest::Client,
    tools: Vec<ServerTool>,
}

impl ToolServers {
    /// Connects to all servers and lists their tools.
    ///
    /// # Errors
    /// For the first server that does not answer, or whose tools cannot be shown to a policy.
    pub async fn connect(settings: &[ToolServerSettings]) -> Result<Self, ToolServerError> {
        let mut all = Self::default();
        let mut bytes = 0;
        for settings in settings {
            let mut server = ToolServer::new(settings.clone())?;
            let (session, tools) = server.open().await?;
            session.close().await;
            bytes += tools.iter().map(|tool| tool.schema.to_string().len()).sum::<usize>();
            all.schemas.extend(tools.iter().map(|tool| tool.schema.clone()));
            if all.schemas.len() > MAX_TOOLS || bytes > MAX_SCHEMA_BYTES {
                return Err(server.error(ToolServerErrorKind::TooManyTools));
            }
            server.tools = tools;
            all.servers.push(server);
        }
        Ok(all)
    }

    /// JSON schemas of all tools, as chat templates read them, with the names by which the policy calls
    /// them.
    pub fn schemas(&self) -> &[Value] {
        &self.schemas
    }

    /// Names by which the policy calls the tools.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.schemas.iter().filter_map(called)
    }

    /// The tools of all servers as JSON, for [`Self::check_recorded`].
    ///
    /// # Errors
    /// If they cannot be written as JSON.
    pub fn record(&self) -> serde_json::Result<String> {
        let tools: BTreeMap<&str, &[ServerTool]> =
            self.servers.iter().map(|s| (s.settings.name.as_str(), s.tools.as_slice())).collect();
        serde_json::to_string(&tools)
    }

    /// Checks that the tools are those of an earlier [`Self::record`].
    ///
    /// # Errors
    /// If a server changed its tools, or the record cannot be read.
    pub fn check_recorded(&self, record: &str) -> Result<(), ToolServerError> {
        let recorded: serde_json::Result<BTreeMap<String, Vec<ServerTool>>> =
            serde_json::from_str(record);
        self.servers.iter().try_for_each(|server| {
            let recorded = recorded
                .as_ref()
                .map_err(|error| server.error(ToolServerErrorKind::Record(error.to_string())))?;
            let earlier = recorded.get(&server.settings.name).map_or(&[][..], Vec::as_slice);
            server.check_same(earlier, &server.tools)
        })
    }

    /// Opens a session with each server, and checks that its tools are still the same.
    ///
    /// # Errors
    /// For the first server that does not answer, or that changed its tools.
    pub(crate) async fn open(self: &Arc<Self>) -> Result<ToolSessions, ToolServerError> {
        let mut sessions = ToolSessions { servers: Arc::clone(self), open: Vec::new() };
        for server in &self.servers {
            let opened = async {
                let (session, tools) = server.open().await?;
                sessions.open.push(session);
                server.check_same(&server.tools, &tools)
            };
            if let Err(error) = opened.await {
                sessions.close().await;
                return Err(error);
            }
        }
        Ok(sessions)
    }
}

impl ToolServer {
    fn new(settings: ToolServerSettings) -> Result<Self, ToolServerError> {
        let error = |kind| ToolServerError {
            server: settings.name.clone(),
            url: without_credentials(&settings.url).into_owned(),
            kind,
        };
        let mut headers = HeaderMap::new();
        let token = settings.token().map_err(|name| error(ToolServerErrorKind::Token(name)))?;
        if let Some(token) = token {
            let value = HeaderValue::from_str(&format!("Bearer {token}"));
            let mut value = value.map_err(|_| {
                let name = settings.token_env.clone().unwrap_or_default();
                error(ToolServerErrorKind::Token(name))
            })?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        // Fails only where a provider is installed already, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(CONNECT_TIME)
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .default_headers(headers)
            .build()
            .map_err(|cause| error(ToolServerErrorKind::Client(cause)))?;
        Ok(Self { settings, http, tools: Vec::new() })
    }

    /// Opens a session and lists the tools.
    async fn open(&self) -> Result<(Session, Vec<ServerTool>), ToolServerError> {
        let time = self.settings.timeout.0;
        let opened = async {
            let session = Session::open(self.http.clone(), &self.settings.url).await?;
            let tools = list::checked(&self.settings, session.tools().await?)?;
            Ok((session, tools))
        };
        let opened = timeout(time, Box::pin(opened)).await;
        let opened = opened.unwrap_or(Err(ToolServerErrorKind::TimedOut(time)));
        opened.map_err(|kind| self.error(kind))
    }

    fn check_same(
        &self,
        earlier: &[ServerTool],
        now: &[ServerTool],
    ) -> Result<(), ToolServerError> {
        match list::difference(earlier, now) {
            None => Ok(()),
            Some(difference) => Err(self.error(ToolServerErrorKind::Changed(difference))),
        }
    }

    fn error(&self, kind: ToolServerErrorKind) -> ToolServerError {
        let ToolServerSettings { name, url, .. } = &self.settings;
        ToolServerError { server: name.clone(), url: without_credentials(url).into_owned(), kind }
    }
}

/// The sessions of one attempt, one with each server. Without any before they are opened.
#[derive(Debug, Default)]
pub(crate) struct ToolSessions {
    servers: Arc<ToolServers>,
    open: Vec<Session>,
}

impl ToolSessions {
    /// JSON schemas of all tools.
    pub(crate) fn schemas(&self) -> &[Value] {
        self.servers.schemas()
    }

    /// Calls a tool by the policy's name of it. Returns what the policy sees.
    ///
    /// # Errors
    /// If its server does not answer anymore.
    pub(crate) async fn call(
        &self,
        called: &str,
        arguments: Map<String, Value>,
        time: Duration,
    ) -> Result<String, ToolServerError> {
        let find = |server: &ToolServer| {
            let mut tools = server.tools.iter();
            tools.find(|tool| tool.called() == called).map(|tool| tool.name.clone())
        };
        let pairs = self.servers.servers.iter().zip(&self.open);
        let mut found = pairs.filter_map(|(server, open)| Some((server, open, find(server)?)));
        let Some((server, session, tool)) = found.next() else {
            let kind = ToolServerErrorKind::Unknown(called.to_owned());
            return Err(ToolServerError { server: String::new(), url: String::new(), kind });
        };
        let time = time.min(server.settings.timeout.0);
        session.call(&tool, arguments, time).await.map_err(|source| {
            server.error(ToolServerErrorKind::Gone { tool, source: source.into() })
        })
    }

    /// Ends all sessions.
    pub(crate) async fn close(self) {
        for session in self.open {
            session.close().await;
        }
    }
}
