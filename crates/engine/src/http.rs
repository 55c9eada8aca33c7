//! One HTTP exchange with an engine: bounded in time and bytes, with errors of our own types.

use crate::error::{EngineError, EngineErrorKind, ErrorDetail, Refusal};
use crate::frames::{Frames, error_of};
use bytes::Bytes;
use orchestrate_settings::TlsClientPem;
use orchestrate_types::TokenId;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use reqwest::{Method, RequestBuilder, Response, Url};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For calls that do not sample: information, control and aborts.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Shorter than the 5 s after which the servers close idle connections, so that no request is sent
/// on a connection that is being closed.
const POOL_IDLE: Duration = Duration::from_secs(2);
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// Maximum size of a reply that is not a generation, in bytes. `/server_info` has about 40 KB,
/// `/metrics` 100 KB.
const INFO_LIMIT: usize = 8 << 20;

/// Maximum number of bytes that are read of an error reply.
const ERROR_LIMIT: usize = 64 << 10;
/// Maximum number of characters that are kept of a server's message.
const MESSAGE_CHARS: usize = 500;

/// The reply of `/v1/models`.
#[derive(Deserialize)]
pub(crate) struct ModelList {
    pub(crate) data: Vec<ServedModel>,
}

/// One model of a [`ModelList`].
#[derive(Deserialize)]
pub(crate) struct ServedModel {
    /// The model's name in requests.
    pub(crate) id: String,
    /// Folder or name that it was loaded from, where reported.
    pub(crate) root: Option<String>,
    /// Maximum sequence length in tokens, where reported.
    pub(crate) max_model_len: Option<usize>,
}

/// HTTP access to one server: its address, API key and connection pool.
#[derive(Debug)]
pub struct Server {
    base: String,
    /// `base`, parsed.
    root: Url,
    api_key: Option<HeaderValue>,
    http: reqwest::Client,
}

impl Server {
    /// Connects on the first call. Proxy settings of the environment are ignored.
    pub(crate) fn new(
        url: &str,
        api_key: Option<&str>,
        tls: &TlsClientPem,
    ) -> Result<Self, EngineError> {
        let base = url.trim_end_matches('/').to_owned();
        let error = |kind| EngineError { engine: base.clone(), call: "connect", kind };
        // `localhost:30000` parses, too: as a URL with the scheme `localhost`.
        let root = Url::parse(&base).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let root = root.ok_or_else(|| {
            let message =
                format!("`{base}` is not a valid HTTP URL (expected e.g. http://127.0.0.1:30000)");
            error(EngineErrorKind::unsupported(message))
        })?;
        let api_key = api_key
            .map(|key| {
                let mut value =
                    HeaderValue::from_str(&format!("Bearer {key}")).map_err(|cause| {
                        let message = "the API key cannot be sent in an HTTP header";
                        error(EngineErrorKind::Unsupported(ErrorDetail::caused_by(message, cause)))
                    })?;
                value.set_sensitive(true);
                Ok::<_, EngineError>(value)
            })
            .transpose()?;
        // Fails only where a provider is installed already, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_idle_timeout(POOL_IDLE)
            .tcp_keepalive(KEEP_ALIVE)
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never());
        let http = tls.configure(http).and_then(reqwest::ClientBuilder::build);
        let http = http.map_err(|cause| {
            let message =
                "the HTTP client cannot be set up; check engine.tls_ca, tls_cert and tls_key";
            error(EngineErrorKind::Unsupported(ErrorDetail::caused_by(message, cause)))
        })?;
        Ok(Self { base, root, api_key, http })
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    pub(crate) fn error(&self, call: &'static str, kind: EngineErrorKind) -> EngineError {
        EngineError { engine: self.base.clone(), call, kind }
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.with_key(self.http.request(method, format!("{}{path}", self.base)))
    }

    fn with_key(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.api_key {
            Some(key) => request.header(AUTHORIZATION, key),
            None => request,
        }
    }

    /// A request that samples. Its headers name the conversation for routers between us and the
    /// server.
    pub(crate) fn sampling_request(
        &self,
        call: &'static str,
        body: String,
        session: &str,
    ) -> RequestBuilder {
        // A wrapped body cannot be cloned. Otherwise the client would hold a second copy until the
        // reply arrives, to send it again after a redirect or for a retry; we do neither.
        let body = reqwest::Body::wrap(body);
        let json = HeaderValue::from_static("application/json");
        // Only the path is parsed, because this happens for every turn.
        let mut url = self.root.clone();
        url.set_path(&format!("{}{call}", self.root.path().trim_end_matches('/')));
        let post = self.with_key(self.http.request(Method::POST, url));
        let post = post.header(CONTENT_TYPE, json).body(body);
        match HeaderValue::from_str(session) {
            Ok(session) => {
                post.header("x-smg-routing-key", &session).header("x-session-id", session)
            }
            Err(_) => post,
        }
    }

    /// Gets a JSON document.
    pub(crate) async fn get_json<T: DeserializeOwned>(
        &self,
        call: &'static str,
    ) -> Result<T, EngineError> {
        let body = self.get(call).await?;
        serde_json::from_slice(&body).map_err(|error| {
            let message = format!("cannot parse `{}`", excerpt(&body));
            let detail = ErrorDetail::caused_by(message, error);
            self.error(call, EngineErrorKind::InvalidReply(detail))
        })
    }

    /// Like [`Server::get_json`]; `None` if the server does not have the route.
    pub(crate) async fn get_json_if_supported<T: DeserializeOwned>(
        &self,
        call: &'static str,
    ) -> Result<Option<T>, EngineError> {
        if_supported(self.get_json(call).await)
    }

    /// Gets a document as bytes.
    pub(crate) async fn get(&self, call: &'static str) -> Result<Bytes, EngineError> {
        let body = send(self.request(Method::GET, call), CALL_TIMEOUT, INFO_LIMIT).await;
        body.map_err(|kind| self.error(call, kind))
    }

    /// Posts a command. `call` is the route as errors name it; `path` is the route with its query.
    pub(crate) async fn post_json(
        &self,
        call: &'static str,
        path: &str,
        body: &serde_json::Value,
        timeout: Duration,
    ) -> Result<Bytes, EngineError> {
        let request = self.request(Method::POST, path).json(body);
        send(request, timeout, INFO_LIMIT).await.map_err(|kind| self.error(call, kind))
    }
}

/// The JSON body of a request: token ids under `key`, then the fields of the object `others`.
///
/// The ids are nearly all of the body and are sent again with every turn. They bypass the serializer,
/// and the text is allocated once.
pub(crate) fn body_with_ids(key: &str, ids: &[TokenId], others: &impl Serialize) -> String {
    // Cannot fail: numbers, text and lists only.
    let others = serde_json::to_string(others).unwrap_or_default();
    let mut text = Vec::with_capacity(key.len() + 32 + max_text_len(ids) + others.len());
    text.extend_from_slice(format!("{{\"{key}\":[").as_bytes());
    write_ids(&mut text, ids);
    text.extend_from_slice(b"],");
    text.extend_from_slice(others.strip_prefix('{').unwrap_or(&others).as_bytes());
    // Cannot fail: digits, and the output of a serializer.
    String::from_utf8(text).unwrap_or_default()
}

/// Upper bound of the text size of `ids` in bytes: as if each had as many digits as the largest, and
/// a comma.
fn max_text_len(ids: &[TokenId]) -> usize {
    let largest = ids.iter().max().copied().unwrap_or(0);
    ids.len() * (largest.checked_ilog10().unwrap_or(0) as usize + 2)
}

/// Number of bytes written at once: seven digits and a comma.
const WORD: usize = 8;

/// Appends ids with commas between them. Each id is written as eight bytes, and the next id
/// overwrites the bytes that are left over. So there is no branch on the number of digits, which a
/// processor cannot predict.
fn write_ids(text: &mut Vec<u8>, ids: &[TokenId]) {
    if ids.iter().any(|id| *id >= SEVEN_DIGITS) {
        let texts: Vec<String> = ids.iter().map(ToString::to_string).collect();
        text.extend_from_slice(texts.join(",").as_bytes());
        return;
    }
    let mut end = text.len();
    // The last id may be written with bytes left over.
    text.resize(end + max_text_len(ids) + WORD, 0);
    for id in ids {
        let places = seven_digits(*id);
        // Bytes are in text order. Leading zeros are dropped, but at least one digit stays.
        let zeros = (places.trailing_zeros() / 8).min(7);
        let digits = (places | u64::from_le_bytes([b'0'; WORD])) >> (8 * zeros);
        let bytes = digits | (u64::from(b',') << (64 - 8 * zeros));
        // Always in range: the text was resized for all ids.
        if let Some(target) = text.get_mut(end..end + WORD) {
            target.copy_from_slice(&bytes.to_le_bytes());
        }
        end += WORD + 1 - zeros as usize;
    }
    // Cuts off the comma after the last id.
    text.truncate(end - usize::from(!ids.is_empty()));
}

const SEVEN_DIGITS: TokenId = 10_000_000;

/// The decimal digits of a number below ten million, one per byte, the first one 0. All are computed
/// at once within one 64-bit word, by splitting it into halves, then pairs, then digits.
fn seven_digits(id: TokenId) -> u64 {
    // Division by a constant as multiplication and shift, exact for the values of a lane.
    let lanes = u64::from(id / 10_000) | (u64::from(id % 10_000) << 32);
    let hundreds = ((lanes * 10_486) >> 20) & 0x7f_0000_007f;
    let lanes = hundreds | ((lanes - 100 * hundreds) << 16);
    let tens = ((lanes * 103) >> 10) & 0xf_000f_000f_000f;
    tens | ((lanes - 10 * tens) << 8)
}

/// Turns "there is no such route" into `None`.
pub(crate) fn if_supported<T>(reply: Result<T, EngineError>) -> Result<Option<T>, EngineError> {
    match reply {
        Ok(reply) => Ok(Some(reply)),
        Err(EngineError { kind: EngineErrorKind::Refused { status: 404 | 405, .. }, .. }) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Sends a request and reads a successful reply of at most `limit` bytes, within `timeout`.
/// Dropping the future closes the connection, which aborts the request on the engine.
pub(crate) async fn send(
    request: RequestBuilder,
    timeout: Duration,
    limit: usize,
) -> Result<Bytes, EngineErrorKind> {
    tokio::time::timeout(timeout, read(request, limit))
        .await
        .unwrap_or(Err(EngineErrorKind::TimedOut(timeout)))
}

/// Like [`send`], for a reply that is an event stream: `progress` gets its frames as they arrive, and
/// the last one is returned.
pub(crate) async fn send_streaming(
    request: RequestBuilder,
    timeout: Duration,
    limit: usize,
    progress: impl FnMut(&[u8]),
) -> Result<Bytes, EngineErrorKind> {
    tokio::time::timeout(timeout, read_frames(request, limit, progress))
        .await
        .unwrap_or(Err(EngineErrorKind::TimedOut(timeout)))
}

async fn read_frames(
    request: RequestBuilder,
    limit: usize,
    mut progress: impl FnMut(&[u8]),
) -> Result<Bytes, EngineErrorKind> {
    let mut response = request.send().await.map_err(unreachable)?;
    if !response.status().is_success() {
        return Err(refusal(response).await);
    }
    let content_type = response.headers().get(CONTENT_TYPE);
    if !content_type.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream")) {
        // It answers whole, as some routers do.
        return whole(response, limit).await;
    }
    let mut frames = Frames::default();
    while let Some(chunk) = response.chunk().await.map_err(unreachable)? {
        if frames.push(&chunk) {
            progress(frames.newest());
        }
        // A frame and the beginning of the next one.
        if frames.held() > limit.saturating_mul(2) {
            return Err(too_long(limit));
        }
    }
    let last = frames.into_last();
    error_of(&last).map_or_else(|| Ok(Bytes::from(last)), Err)
}

async fn read(request: RequestBuilder, limit: usize) -> Result<Bytes, EngineErrorKind> {
    let response = request.send().await.map_err(unreachable)?;
    if response.status().is_success() {
        whole(response, limit).await
    } else {
        Err(refusal(response).await)
    }
}

/// The body of a successful reply.
async fn whole(mut response: Response, limit: usize) -> Result<Bytes, EngineErrorKind> {
    let announced = response.content_length().unwrap_or(0);
    if announced > limit as u64 {
        return Err(too_long(limit));
    }
    // The first chunk is nearly always the whole body.
    let mut first = Bytes::new();
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(unreachable)? {
        if first.len().max(body.len()) + chunk.len() > limit {
            return Err(too_long(limit));
        }
        if first.is_empty() {
            first = chunk;
            continue;
        }
        if body.is_empty() {
            body.reserve_exact(usize::try_from(announced).unwrap_or(0));
            body.extend_from_slice(&first);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(if body.is_empty() { first } else { Bytes::from(body) })
}

/// The error that a reply without success stands for.
async fn refusal(mut response: Response) -> EngineErrorKind {
    let status = response.status();
    let retry_after = response.headers().get(RETRY_AFTER).and_then(parse_retry_after);
    let mut body = Vec::new();
    while body.len() < ERROR_LIMIT {
        match response.chunk().await {
            Ok(Some(chunk)) => body.extend_from_slice(&chunk),
            // The status is enough if the message is cut off.
            Ok(None) | Err(_) => break,
        }
    }
    let message = error_message(&body).unwrap_or_else(|| excerpt(&body));
    let meaning = Refusal::of(&body);
    EngineErrorKind::Refused { status: status.as_u16(), message, meaning, retry_after }
}

/// The pause that `Retry-After` requests, in seconds. The date form is ignored: it would need
/// synchronised clocks, and servers and proxies under load send seconds.
fn parse_retry_after(value: &HeaderValue) -> Option<Duration> {
    value.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}

fn too_long(limit: usize) -> EngineErrorKind {
    EngineErrorKind::invalid_reply(format!("the body is longer than {limit} bytes"))
}

/// The message in an error body. Depending on the server it is the text `error`, `error.message`,
/// `message` or `detail`.
pub(crate) fn error_message(body: &[u8]) -> Option<String> {
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    let error = body.get("error");
    let message = error
        .and_then(|error| error.as_str().or_else(|| error.get("message")?.as_str()))
        .or_else(|| body.get("message")?.as_str())
        .or_else(|| body.get("detail")?.as_str())?;
    Some(message.chars().take(MESSAGE_CHARS).collect())
}

/// The start of a body, escaped, for error messages.
pub(crate) fn excerpt(body: &[u8]) -> String {
    let start = body.get(..body.len().min(MESSAGE_CHARS / 2)).unwrap_or_default();
    String::from_utf8_lossy(start).escape_debug().to_string()
}

/// A failed connection. The URL is left out of the error, because the engine's name has it.
fn unreachable(error: reqwest::Error) -> EngineErrorKind {
    EngineErrorKind::Unreachable(ErrorDetail::caused_by("", error.without_url()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[test]
    fn ids_and_other_fields_form_one_object() {
        let of_each_length: Vec<u32> =
            (0..10).map(|digits| 10_u32.pow(digits)).flat_map(|id| [id - 1, id]).collect();
        let seven_digits_at_most: Vec<u32> =
            of_each_length.iter().copied().filter(|id| *id < SEVEN_DIGITS).collect();
        assert_eq!(seven_digits_at_most.len(), 15);
        for ids in [&[][..], &[7], &[0, 151_935, u32::MAX], &of_each_length, &seven_digits_at_most]
        {
            let text = body_with_ids("ids", ids, &serde_json::json!({"a": "b", "c": [1]}));
            let listed: Vec<String> = ids.iter().map(ToString::to_string).collect();
            assert_eq!(text, format!(r#"{{"ids":[{}],"a":"b","c":[1]}}"#, listed.join(",")));
        }
    }

    #[test]
    fn request_paths_are_appended_to_the_base_url() {
        for (url, path) in [
            ("http://one:1", "http://one:1/generate"),
            ("http://one:1/", "http://one:1/generate"),
            ("https://one/models/a/", "https://one/models/a/generate"),
        ] {
            let server = Server::new(url, Some("key"), &TlsClientPem::default()).unwrap();
            let request = server.sampling_request("/generate", String::new(), "session");
            let request = request.build().unwrap();
            assert_eq!(request.url().as_str(), path);
            assert_eq!(request.headers()[AUTHORIZATION], "Bearer key");
        }
        for url in ["", "/one", "localhost:30000", "unix:///one"] {
            let error = Server::new(url, None, &TlsClientPem::default()).unwrap_err().to_string();
            assert!(error.contains("is not a valid HTTP URL (expected e.g. http://"), "{error}");
        }
    }

    #[tokio::test]
    async fn chunked_bodies_are_joined_up_to_the_limit() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let serve = async {
            loop {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut request = [0; 1024];
                assert!(socket.read(&mut request).await.unwrap() > 0);
                let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
                for chunk in [head, "3\r\nabc\r\n", "2\r\nde\r\n", "4\r\nfghi\r\n", "0\r\n\r\n"] {
                    // The client disconnects at its limit.
                    if socket.write_all(chunk.as_bytes()).await.is_err() {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        };
        let requests = async {
            let read = async |limit| {
                // A new connection each time: the server closes it after one reply.
                let server = Server::new(&url, None, &TlsClientPem::default()).unwrap();
                send(server.request(Method::GET, "/"), CALL_TIMEOUT, limit).await
            };
            assert_eq!(read(9).await.unwrap(), "abcdefghi");
            for limit in [2, 4, 8] {
                let error = read(limit).await.unwrap_err();
                assert!(matches!(error, EngineErrorKind::InvalidReply(_)), "{limit}: {error:?}");
            }
        };
        tokio::select! {
            () = serve => {}
            () = requests => {}
        }
    }

    #[test]
    fn seven_digits_are_the_decimal_digits() {
        for id in (0..10_000_000).step_by(37).chain(0..20_000).chain(9_980_000..10_000_000) {
            let places = seven_digits(id).to_le_bytes();
            let value = places.iter().fold(0, |value, place| 10 * value + u32::from(*place));
            assert!(value == id && places.iter().all(|place| *place < 10), "{id} {places:?}");
        }
    }

    #[test]
    fn the_message_is_found_in_every_form_of_error_body() {
        for body in [
            r#"{"error":"too long"}"#,
            r#"{"error":{"message":"too long"}}"#,
            r#"{"object":"error","message":"too long","code":400}"#,
            r#"{"detail":"too long"}"#,
            r#"{"success":false,"message":"too long"}"#,
        ] {
            assert_eq!(error_message(body.as_bytes()).as_deref(), Some("too long"), "{body}");
        }
        for body in ["", "<html>", "[]", "{}", r#"{"error":7}"#] {
            assert_eq!(error_message(body.as_bytes()), None, "{body}");
        }
    }
}
