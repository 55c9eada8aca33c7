//! One HTTP exchange with an engine: bounded in time and bytes, errors in our words.

use crate::{EngineError, EngineErrorKind};
use bytes::Bytes;
use orchestrate_types::TokenId;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use reqwest::{Method, RequestBuilder, Url};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Questions about the engine, and aborts.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Shorter than the 5 s after which the servers close idle connections, so that no request is
/// sent on one that is being closed.
const POOL_IDLE: Duration = Duration::from_secs(2);
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// Most bytes of an answer that is no generation; `/server_info` has about 40 KB, `/metrics` 100.
const INFO_LIMIT: usize = 8 << 20;

/// Most bytes of an error answer that are read.
const ERROR_LIMIT: usize = 64 << 10;
/// Most characters of a foreign message that are handed on.
const MESSAGE_CHARS: usize = 500;

/// What `/v1/models` says.
#[derive(Deserialize)]
pub(crate) struct Models {
    pub(crate) data: Vec<ServedModel>,
}

/// One of [`Models`].
#[derive(Deserialize)]
pub(crate) struct ServedModel {
    /// Its name in requests.
    pub(crate) id: String,
    /// Folder or name that it was loaded from, where the server says so.
    pub(crate) root: Option<String>,
    /// The longest sequence it takes, in tokens, where the server says so.
    pub(crate) max_model_len: Option<usize>,
}

/// One server: where it is, how to reach it, and who asks.
#[derive(Debug)]
pub struct Wire {
    base: String,
    /// The same, taken apart.
    root: Url,
    api_key: Option<HeaderValue>,
    http: reqwest::Client,
}

impl Wire {
    /// Connects on the first call. Proxies of the environment are ignored.
    pub(crate) fn new(url: &str, api_key: Option<&str>) -> Result<Self, EngineError> {
        let base = url.trim_end_matches('/').to_owned();
        let unfit = |words: String| EngineError {
            engine: base.clone(),
            call: "connect",
            kind: EngineErrorKind::Unfit(words),
        };
        // `localhost:30000` is a URL, too: of the scheme `localhost`.
        let root = Url::parse(&base).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let root = root.ok_or_else(|| {
            unfit(format!("`{base}` is no HTTP address; one is like http://127.0.0.1:30000"))
        })?;
        let api_key = api_key
            .map(|key| {
                let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
                    .map_err(|_| unfit("its API key cannot be sent in a header".to_owned()))?;
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
            .retry(reqwest::retry::never())
            .build()
            .map_err(|error| unfit(unreachable(error).to_string()))?;
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

    /// A request to sample, with the conversation named for routers that may stand in between.
    pub(crate) fn post(&self, call: &'static str, body: String, session: &str) -> RequestBuilder {
        // Wrapped, it cannot be cloned: the client would hold a second body until the answer is
        // there, to send it again where a redirect or a retry asks for it. Both are ours to decide.
        let body = reqwest::Body::wrap(body);
        let json = HeaderValue::from_static("application/json");
        // Only the path is parsed: this is done for every turn.
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

    /// The JSON answer to a question.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        call: &'static str,
    ) -> Result<T, EngineError> {
        let body = self.read(call).await?;
        serde_json::from_slice(&body).map_err(|error| {
            let words = format!("{error}; it begins `{}`", excerpt(&body));
            self.error(call, EngineErrorKind::InvalidReply(words))
        })
    }

    /// As [`Wire::ask`]; `None` where the server has no such route.
    pub(crate) async fn ask_if_known<T: DeserializeOwned>(
        &self,
        call: &'static str,
    ) -> Result<Option<T>, EngineError> {
        if_known(self.ask(call).await)
    }

    /// The bytes of an answer to a question.
    pub(crate) async fn read(&self, call: &'static str) -> Result<Bytes, EngineError> {
        let answer = exchange(self.request(Method::GET, call), CALL_TIMEOUT, INFO_LIMIT).await;
        answer.map_err(|kind| self.error(call, kind))
    }

    /// Sends a command. `call` is the route as errors name it; its query may be in `path`.
    pub(crate) async fn tell(
        &self,
        call: &'static str,
        path: &str,
        body: &serde_json::Value,
        timeout: Duration,
    ) -> Result<Bytes, EngineError> {
        let request = self.request(Method::POST, path).json(body);
        exchange(request, timeout, INFO_LIMIT).await.map_err(|kind| self.error(call, kind))
    }
}

/// The JSON text of a request: token ids under `key`, then the fields of `others`, an object.
///
/// The ids are nearly all of it and are sent again with every turn, so they are not passed one by
/// one through the serializer, and the text does not grow meanwhile.
pub(crate) fn json(key: &str, ids: &[TokenId], others: &impl Serialize) -> String {
    // Numbers, text and lists only: it cannot fail.
    let others = serde_json::to_string(others).unwrap_or_default();
    let mut text = Vec::with_capacity(key.len() + 32 + room_for(ids) + others.len());
    text.extend_from_slice(format!("{{\"{key}\":[").as_bytes());
    write_ids(&mut text, ids);
    text.extend_from_slice(b"],");
    text.extend_from_slice(others.strip_prefix('{').unwrap_or(&others).as_bytes());
    // Digits and the text of a serializer: it cannot fail.
    String::from_utf8(text).unwrap_or_default()
}

/// Bytes that some ids take at most, if each has as many digits as the largest, and a comma.
fn room_for(ids: &[TokenId]) -> usize {
    let largest = ids.iter().max().copied().unwrap_or(0);
    ids.len() * (largest.checked_ilog10().unwrap_or(0) as usize + 2)
}

/// Bytes that are written at once: seven digits and a comma.
const WORD: usize = 8;

/// Appends ids with commas between them. Each is written as the same number of bytes, of which the
/// next one overwrites those that are none of it: nothing depends on how many digits there are, which
/// no processor can guess.
fn write_ids(text: &mut Vec<u8>, ids: &[TokenId]) {
    if ids.iter().any(|id| *id >= SEVEN_DIGITS) {
        let words: Vec<String> = ids.iter().map(ToString::to_string).collect();
        text.extend_from_slice(words.join(",").as_bytes());
        return;
    }
    let mut end = text.len();
    // What is written of the last one may be more than it has.
    text.resize(end + room_for(ids) + WORD, 0);
    for id in ids {
        let places = seven_digits(*id);
        // Bytes are in the order of the text; zeros in front are not written, but for the last.
        let zeros = (places.trailing_zeros() / 8).min(7);
        let digits = (places | u64::from_le_bytes([b'0'; WORD])) >> (8 * zeros);
        let bytes = digits | (u64::from(b',') << (64 - 8 * zeros));
        // There is room for all of them.
        if let Some(room) = text.get_mut(end..end + WORD) {
            room.copy_from_slice(&bytes.to_le_bytes());
        }
        end += WORD + 1 - zeros as usize;
    }
    // The comma after the last id.
    text.truncate(end - usize::from(!ids.is_empty()));
}

const SEVEN_DIGITS: TokenId = 10_000_000;

/// The decimal places of a number below ten million, one per byte, the first one a zero: computed side
/// by side in one word, halves of it first.
fn seven_digits(id: TokenId) -> u64 {
    // Division by a constant as multiplication and shift, exact for values of a lane's size.
    let lanes = u64::from(id / 10_000) | (u64::from(id % 10_000) << 32);
    let hundreds = ((lanes * 10_486) >> 20) & 0x7f_0000_007f;
    let lanes = hundreds | ((lanes - 100 * hundreds) << 16);
    let tens = ((lanes * 103) >> 10) & 0xf_000f_000f_000f;
    tens | ((lanes - 10 * tens) << 8)
}

/// Turns "there is no such route" into `None`.
pub(crate) fn if_known<T>(answer: Result<T, EngineError>) -> Result<Option<T>, EngineError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(EngineError { kind: EngineErrorKind::Refused { status: 404 | 405, .. }, .. }) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Sends a request and reads a successful answer of at most `limit` bytes, within `timeout`.
/// Dropping the future closes the connection, which aborts the request on the engine.
pub(crate) async fn exchange(
    request: RequestBuilder,
    timeout: Duration,
    limit: usize,
) -> Result<Bytes, EngineErrorKind> {
    tokio::time::timeout(timeout, read(request, limit))
        .await
        .unwrap_or(Err(EngineErrorKind::TimedOut(timeout)))
}

async fn read(request: RequestBuilder, limit: usize) -> Result<Bytes, EngineErrorKind> {
    let mut response = request.send().await.map_err(unreachable)?;
    let status = response.status();
    if status.is_success() {
        let announced = response.content_length().unwrap_or(0);
        if announced > limit as u64 {
            return Err(too_long(limit));
        }
        // Nearly always the first piece is all of it.
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
        return Ok(if body.is_empty() { first } else { Bytes::from(body) });
    }
    let retry_after = response.headers().get(RETRY_AFTER).and_then(pause);
    let mut body = Vec::new();
    while body.len() < ERROR_LIMIT {
        match response.chunk().await {
            Ok(Some(chunk)) => body.extend_from_slice(&chunk),
            // The status alone says enough when the words are cut off.
            Ok(None) | Err(_) => break,
        }
    }
    let message = error_message(&body).unwrap_or_else(|| excerpt(&body));
    Err(EngineErrorKind::Refused { status: status.as_u16(), message, retry_after })
}

/// The pause a server asks for: seconds, as servers and proxies under load send it. A date, the
/// other form, needs clocks that agree, and is left out.
fn pause(value: &HeaderValue) -> Option<Duration> {
    value.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}

fn too_long(limit: usize) -> EngineErrorKind {
    let words = format!("its body is longer than the {limit} bytes such a reply can have");
    EngineErrorKind::InvalidReply(words)
}

/// The words of an error body. Engines send `error` as text or as an object with `message`,
/// `message` or `detail` at the top, all with the same meaning.
pub(crate) fn error_message(body: &[u8]) -> Option<String> {
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    let error = body.get("error");
    let words = error
        .and_then(|error| error.as_str().or_else(|| error.get("message")?.as_str()))
        .or_else(|| body.get("message")?.as_str())
        .or_else(|| body.get("detail")?.as_str())?;
    Some(words.chars().take(MESSAGE_CHARS).collect())
}

/// The beginning of a body, for a person.
pub(crate) fn excerpt(body: &[u8]) -> String {
    let start = body.get(..body.len().min(MESSAGE_CHARS / 2)).unwrap_or_default();
    String::from_utf8_lossy(start).escape_debug().to_string()
}

/// An error with its causes; reqwest's own text names only the URL.
pub(crate) fn unreachable(error: reqwest::Error) -> EngineErrorKind {
    let error = error.without_url();
    let mut words = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        words = format!("{words}: {inner}");
        cause = inner.source();
    }
    EngineErrorKind::Unreachable(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[test]
    fn ids_and_other_fields_are_one_object() {
        let of_each_length: Vec<u32> =
            (0..10).map(|digits| 10_u32.pow(digits)).flat_map(|id| [id - 1, id]).collect();
        let seven_digits_at_most: Vec<u32> =
            of_each_length.iter().copied().filter(|id| *id < SEVEN_DIGITS).collect();
        assert_eq!(seven_digits_at_most.len(), 15);
        for ids in [&[][..], &[7], &[0, 151_935, u32::MAX], &of_each_length, &seven_digits_at_most]
        {
            let text = json("ids", ids, &serde_json::json!({"a": "b", "c": [1]}));
            let listed: Vec<String> = ids.iter().map(ToString::to_string).collect();
            assert_eq!(text, format!(r#"{{"ids":[{}],"a":"b","c":[1]}}"#, listed.join(",")));
        }
    }

    #[test]
    fn a_request_goes_below_the_path_of_its_server() {
        for (url, path) in [
            ("http://one:1", "http://one:1/generate"),
            ("http://one:1/", "http://one:1/generate"),
            ("https://one/models/a/", "https://one/models/a/generate"),
        ] {
            let wire = Wire::new(url, Some("key")).unwrap();
            let post = wire.post("/generate", String::new(), "session").build().unwrap();
            assert_eq!(post.url().as_str(), path);
            assert_eq!(post.headers()[AUTHORIZATION], "Bearer key");
        }
        for url in ["", "/one", "localhost:30000", "unix:///one"] {
            let error = Wire::new(url, None).unwrap_err().to_string();
            assert!(error.contains("is no HTTP address; one is like http://"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_body_in_pieces_is_put_together_within_its_limit() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let serve = async {
            loop {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut asked = [0; 1024];
                assert!(socket.read(&mut asked).await.unwrap() > 0);
                let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
                for piece in [head, "3\r\nabc\r\n", "2\r\nde\r\n", "4\r\nfghi\r\n", "0\r\n\r\n"] {
                    // Who has read too much goes away.
                    if socket.write_all(piece.as_bytes()).await.is_err() {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        };
        let ask = async {
            let read = async |limit| {
                // Each on a connection of its own: the server closes it after one answer.
                let wire = Wire::new(&url, None).unwrap();
                exchange(wire.request(Method::GET, "/"), CALL_TIMEOUT, limit).await
            };
            assert_eq!(read(9).await.unwrap(), "abcdefghi");
            for limit in [2, 4, 8] {
                let error = read(limit).await.unwrap_err();
                assert!(matches!(error, EngineErrorKind::InvalidReply(_)), "{limit}: {error:?}");
            }
        };
        tokio::select! {
            () = serve => {}
            () = ask => {}
        }
    }

    #[test]
    fn each_number_has_its_digits() {
        for id in (0..10_000_000).step_by(37).chain(0..20_000).chain(9_980_000..10_000_000) {
            let places = seven_digits(id).to_le_bytes();
            let value = places.iter().fold(0, |value, place| 10 * value + u32::from(*place));
            assert!(value == id && places.iter().all(|place| *place < 10), "{id} {places:?}");
        }
    }

    #[test]
    fn every_form_of_an_error_body_is_understood() {
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
