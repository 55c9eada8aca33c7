//! A tool server over HTTP, written with the Rust SDK, in a thread of its own: it can vanish at once,
//! with all of its connections.

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use orchestrate_rollout::ToolServerSection;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorData,
    ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{RoleServer, ServerHandler};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use tokio_util::sync::CancellationToken;

/// More than a client reads of one message.
const FLOOD: usize = 9 << 20;

/// The server's state, for the test and for all sessions.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) tools: Mutex<Vec<Tool>>,
    /// Tools per page of the list.
    pub(crate) page: usize,
    /// Sessions that were opened.
    pub(crate) opened: AtomicUsize,
    /// Sessions that clients ended.
    pub(crate) ended: AtomicUsize,
    /// Told about the first call that a client cancels.
    pub(crate) cancelled: Mutex<Option<SyncSender<()>>>,
    /// The bearer token that requests must have.
    pub(crate) token: Option<String>,
    pub(crate) stop: CancellationToken,
}

/// A running server; dropping it stops it.
pub(crate) struct McpServer {
    pub(crate) address: SocketAddr,
    pub(crate) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

pub(crate) fn tool(name: &'static str, properties: &Value) -> Tool {
    let Value::Object(schema) = json!({"type": "object", "properties": properties}) else {
        panic!("an object")
    };
    Tool::new(name, format!("The tool {name}."), Arc::new(schema))
}

impl McpServer {
    /// A server with all tools of [`Session`].
    pub(crate) fn start() -> Self {
        Self::start_with(Shared { page: 100, ..Shared::default() })
    }

    pub(crate) fn start_with(shared: Shared) -> Self {
        let number = json!({"type": "integer"});
        let names = ["die", "fail", "flood", "garbage", "hang", "json_flood", "long", "picture"];
        let said = ["say", "refuse"].map(|name| tool(name, &json!({"text": {"type": "string"}})));
        let mut tools =
            vec![tool("remember", &json!({})), tool("add", &json!({"a": number, "b": number}))];
        tools.extend(names.into_iter().map(|name| tool(name, &json!({}))));
        tools.extend(said);
        shared.tools.lock().unwrap().extend(tools);
        let shared = Arc::new(shared);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let served = Arc::clone(&shared);
        // With one thread, nothing of it runs any more once the runtime is dropped.
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let stop = served.stop.clone();
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = serve(listener, served) => {}
                }
            });
        });
        Self { address, shared, thread: Some(thread) }
    }

    /// Its section of the settings, with the name `s`.
    pub(crate) fn section(&self) -> ToolServerSection {
        ToolServerSection {
            name: Some("s".to_owned()),
            url: Some(format!("http://{}/mcp", self.address)),
            ..ToolServerSection::default()
        }
    }

    /// Waits until it is gone.
    pub(crate) fn stop(&mut self) {
        self.shared.stop.cancel();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for McpServer {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn serve(listener: std::net::TcpListener, shared: Arc<Shared>) {
    let for_sessions = Arc::clone(&shared);
    let session = move || {
        for_sessions.opened.fetch_add(1, Ordering::Relaxed);
        Ok(Session { shared: Arc::clone(&for_sessions), calls: Arc::default() })
    };
    let manager = Arc::new(LocalSessionManager::default());
    let service =
        StreamableHttpService::new(session, manager, StreamableHttpServerConfig::default());
    let routes = axum::Router::new()
        .nest_service("/mcp", service)
        .layer(from_fn_with_state(shared, misbehave));
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    axum::serve(listener, routes).await.unwrap();
}

/// Refuses requests without the token, and answers some calls as no server should.
async fn misbehave(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let sent = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let wanted = shared.token.as_ref().map(|token| format!("Bearer {token}"));
    if wanted.is_some() && sent != wanted.as_deref() {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if request.method() == axum::http::Method::DELETE {
        shared.ended.fetch_add(1, Ordering::Relaxed);
    }
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap();
    let message: Value = serde_json::from_slice(&body).unwrap_or_default();
    let call = message.pointer("/params/name").and_then(Value::as_str);
    let json = [(header::CONTENT_TYPE, "application/json")];
    match call {
        Some("garbage") => (json, "{\"jsonrpc\": ").into_response(),
        Some("json_flood") => (json, format!("\"{}\"", "x".repeat(FLOOD))).into_response(),
        Some("die") => {
            shared.stop.cancel();
            std::future::pending().await
        }
        Some(_) | None => next.run(Request::from_parts(parts, Body::from(body))).await,
    }
}

/// One session's side of the server.
#[derive(Debug, Clone)]
struct Session {
    shared: Arc<Shared>,
    calls: Arc<AtomicUsize>,
}

impl ServerHandler for Session {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let tools = self.shared.tools.lock().unwrap().clone();
        let cursor = request.and_then(|request| request.cursor).unwrap_or_default();
        let from = cursor.parse().unwrap_or(0);
        let to = tools.len().min(from + self.shared.page);
        Ok(ListToolsResult {
            next_cursor: (to < tools.len()).then(|| to.to_string()),
            tools: tools[from..to].to_vec(),
            ..ListToolsResult::default()
        })
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let text = |text: String| vec![ContentBlock::text(text)];
        let content = match request.name.as_ref() {
            "add" => {
                let arguments = request.arguments.unwrap_or_default();
                let number = |name: &str| {
                    let missing = || ErrorData::invalid_params(format!("{name} is missing"), None);
                    arguments.get(name).and_then(Value::as_i64).ok_or_else(missing)
                };
                text((number("a")? + number("b")?).to_string())
            }
            "fail" => {
                return Ok(CallToolResult::error(text("it cannot be done".to_owned())).into());
            }
            "flood" => text("x".repeat(FLOOD)),
            "hang" => {
                context.ct.cancelled().await;
                if let Some(sender) = self.shared.cancelled.lock().unwrap().take() {
                    sender.send(()).unwrap();
                }
                text(String::new())
            }
            "long" => text("y".repeat(100_000)),
            "picture" => vec![ContentBlock::image("AAAA", "image/png")],
            "say" => {
                let said = request.arguments.unwrap_or_default();
                let said = said["text"].as_str().unwrap().to_owned();
                vec![ContentBlock::text(said.clone()), ContentBlock::image("AAAA", said)]
            }
            "refuse" => {
                let said = request.arguments.unwrap_or_default();
                let said = said["text"].as_str().unwrap().to_owned();
                return Err(ErrorData::invalid_params(said, None));
            }
            "remember" => text((self.calls.fetch_add(1, Ordering::Relaxed) + 1).to_string()),
            other => return Err(ErrorData::invalid_params(format!("no tool {other}"), None)),
        };
        Ok(CallToolResult::success(content).into())
    }
}
