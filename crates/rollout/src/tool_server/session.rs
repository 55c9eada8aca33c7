//! One session with a tool server, and what the policy sees of a call's result.

use super::ToolServerErrorKind;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ClientCapabilities, ClientConfig,
    ClientRequest, ContentBlock, Implementation, JsonObject, PaginatedRequestParams, PingRequest,
    ProtocolVersion, ResourceContents, Tool,
};
use rmcp::service::{RunningService, ServiceError};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::common::client_side_sse::NeverRetry;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
use rmcp::{RoleClient, serve_client};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Largest message of a server, in bytes: ample for a screenshot, which is not shown.
const MAX_MESSAGE_BYTES: usize = 8 << 20;

/// Messages of one session that wait to be read.
const QUEUED_MESSAGES: usize = 2;

/// Tools that one server may list, whether or not they are shown.
const MAX_LISTED: usize = 1024;

/// Size of one server's list of tools, in bytes of JSON.
const MAX_LIST_BYTES: usize = 4 << 20;

/// Time to end a session. The server may be gone, and nothing depends on its answer.
const CLOSE_TIME: Duration = Duration::from_secs(10);

/// An open session. Dropping it ends it as well, without waiting.
#[derive(Debug)]
pub(super) struct Session {
    service: RunningService<RoleClient, ClientConfig>,
}

impl Session {
    pub(super) async fn open(
        http: reqwest::Client,
        url: &str,
    ) -> Result<Self, ToolServerErrorKind> {
        let mut config = StreamableHttpClientTransportConfig::with_uri(url);
        config.max_sse_event_size = MAX_MESSAGE_BYTES;
        config.max_json_response_size = MAX_MESSAGE_BYTES;
        config.channel_buffer_capacity = QUEUED_MESSAGES;
        // A session is one attempt's: a new one would have lost what its calls did.
        config.reinit_on_expired_session = false;
        config.retry_config = Arc::new(NeverRetry::default());
        let transport = StreamableHttpClientTransport::with_client(http, config);
        let name = Implementation::new("orchestrate", env!("CARGO_PKG_VERSION"));
        let client = ClientConfig::new(ClientCapabilities::default(), name)
            .with_protocol_version(ProtocolVersion::LATEST_WITH_INITIALIZE);
        let service = Box::pin(serve_client(client, transport)).await;
        Ok(Self { service: service.map_err(|error| ToolServerErrorKind::Connect(error.into()))? })
    }

    /// The tools of the server.
    pub(super) async fn tools(&self) -> Result<Vec<Tool>, ToolServerErrorKind> {
        let (mut tools, mut bytes, mut page) = (Vec::new(), 0, None);
        loop {
            let list = self.service.list_tools(page).await;
            let list = list.map_err(|error| ToolServerErrorKind::List(error.into()))?;
            bytes += serde_json::to_vec(&list.tools).as_ref().map_or(0, Vec::len);
            tools.extend(list.tools);
            if tools.len() > MAX_LISTED || bytes > MAX_LIST_BYTES {
                return Err(ToolServerErrorKind::LongList);
            }
            let Some(cursor) = list.next_cursor else { return Ok(tools) };
            page = Some(PaginatedRequestParams::default().with_cursor(Some(cursor)));
        }
    }

    /// Calls a tool. What the call itself causes is text for the policy.
    ///
    /// # Errors
    /// If the server does not answer anymore.
    pub(super) async fn call(
        &self,
        tool: &str,
        arguments: JsonObject,
        time: Duration,
    ) -> Result<String, ServiceError> {
        let call = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        // Dropping the call tells the server that it is cancelled.
        match timeout(time, self.service.call_tool_once(call)).await {
            Err(_) => Ok(format!("timed out after {}s", time.as_secs_f64())),
            Ok(Ok(CallToolResponse::Complete(result))) => Ok(shown(&result)),
            Ok(Ok(_)) => Ok("error\nthe tool asks for input, which cannot be given".to_owned()),
            Ok(Err(ServiceError::McpError(error))) => {
                Ok(format!("error {}\n{}", error.code.0, error.message))
            }
            // A reply that is too long or malformed concerns this call alone, and whatever a call can
            // cause is the attempt's own result. A server that is gone is not.
            Ok(Err(error)) => {
                let answers = self.answers(time).await;
                let shown = "error\nthe server sent no valid result";
                answers.then(|| shown.to_owned()).ok_or(error)
            }
        }
    }

    /// Whether the server still knows this session.
    async fn answers(&self, time: Duration) -> bool {
        let ping = ClientRequest::PingRequest(PingRequest::default());
        matches!(timeout(time, self.service.send_request(ping)).await, Ok(Ok(_)))
    }

    /// Ends the session, at the server as well.
    pub(super) async fn close(mut self) {
        if let Err(error) = self.service.close_with_timeout(CLOSE_TIME).await {
            tracing::debug!(%error, "a session with a tool server did not end cleanly");
        }
    }
}

/// The result of a call, as the policy sees it.
fn shown(result: &CallToolResult) -> String {
    let mut parts: Vec<String> = result.content.iter().map(shown_part).collect();
    if let (true, Some(structured)) = (parts.is_empty(), &result.structured_content) {
        parts.push(structured.to_string());
    }
    let text = parts.join("\n");
    let text = text.trim_end();
    let text = if text.is_empty() { "(no output)" } else { text };
    if result.is_error == Some(true) { format!("error\n{text}") } else { text.to_owned() }
}

fn shown_part(part: &ContentBlock) -> String {
    match part {
        ContentBlock::Text(text) => text.text.clone(),
        ContentBlock::Image(image) => format!("[image, {}: not shown]", image.mime_type),
        ContentBlock::Audio(audio) => format!("[audio, {}: not shown]", audio.mime_type),
        ContentBlock::Resource(embedded) => match &embedded.resource {
            ResourceContents::TextResourceContents { text, .. } => text.clone(),
            ResourceContents::BlobResourceContents { uri, .. } => {
                format!("[binary resource {uri}: not shown]")
            }
            _ => "[resource: not shown]".to_owned(),
        },
        ContentBlock::ResourceLink(link) => format!("[resource {}]", link.uri),
        _ => "[content of an unknown kind: not shown]".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn text(result: serde_json::Value) -> String {
        shown(&serde_json::from_value(result).unwrap())
    }

    #[test]
    fn results_are_shown_as_text_and_the_rest_is_named() {
        let part = |text: &str| json!({"type": "text", "text": text});
        assert_eq!(text(json!({"content": [part("a"), part("b\n")]})), "a\nb");
        assert_eq!(text(json!({"content": []})), "(no output)");
        assert_eq!(text(json!({"content": [part("no")], "isError": true})), "error\nno");
        assert_eq!(text(json!({"content": [], "structuredContent": {"a": 1}})), "{\"a\":1}");
        assert_eq!(text(json!({"content": [part("a")], "structuredContent": {"a": 1}})), "a");
        let image = json!({"type": "image", "data": "AAAA", "mimeType": "image/png"});
        let audio = json!({"type": "audio", "data": "AAAA", "mimeType": "audio/wav"});
        let link = json!({"type": "resource_link", "uri": "file:///x", "name": "x"});
        let resource = |body: serde_json::Value| json!({"type": "resource", "resource": body});
        let all = json!({"content": [
            image, audio, link,
            resource(json!({"uri": "file:///t", "text": "inside"})),
            resource(json!({"uri": "file:///b", "blob": "AAAA"})),
        ]});
        assert_eq!(
            text(all),
            "[image, image/png: not shown]\n[audio, audio/wav: not shown]\n[resource file:///x]\n\
             inside\n[binary resource file:///b: not shown]"
        );
    }
}
