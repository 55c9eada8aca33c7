//! From an HTTP request to its reply: body, sampling, keep-alives, and the receipt.

use crate::connection::Unconfirmed;
use crate::episode::Episode;
use crate::fields;
use crate::options::GatewayOptions;
use crate::problem::{Kind, Problem};
use crate::sampler::{Receipt, SampleError, SampleRequest, Sampled};
use crate::text::{Sent, ShownText, TextSink};
use crate::wire::{Envelope, Purpose, Wire};
use axum::body::{Body, to_bytes};
use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt as _, try_join_all};
use futures::stream::{self, Stream, StreamExt as _};
use orchestrate_types::unix_micros;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::select;
use tokio::time::sleep;

/// Samples.
pub(crate) async fn sample<W: Wire>(
    State(options): State<Arc<GatewayOptions>>,
    Extension(episode): Extension<Episode>,
    request: Request,
) -> Response {
    match try_sample::<W>(&options, &episode, request).await {
        Ok(response) => response,
        Err(problem) => {
            note(&episode, &problem);
            problem.response(W::DIALECT)
        }
    }
}

/// Tells the episode that a request for a reply was answered with an error. A request without the
/// episode's key is not the episode's.
pub(crate) fn note(episode: &Episode, problem: &Problem) {
    if problem.kind != Kind::Key {
        episode.sampler().unanswered(problem.code(), &problem.message);
    }
}

/// Counts the tokens of a prompt.
pub(crate) async fn count<W: Wire>(
    State(options): State<Arc<GatewayOptions>>,
    Extension(episode): Extension<Episode>,
    request: Request,
) -> Response {
    let counted = async {
        let (request, _) = read::<W>(&options, &episode, request, Purpose::Count).await?;
        Ok(episode.sampler().count(&request).await?)
    };
    match counted.await {
        Ok(tokens) => axum::Json(W::count(tokens)).into_response(),
        Err(problem) => Problem::response(&problem, W::DIALECT),
    }
}

async fn try_sample<W: Wire>(
    options: &GatewayOptions,
    episode: &Episode,
    request: Request,
) -> Result<Response, Problem> {
    let connection = connection_of(&request);
    let (request, wire) = read::<W>(options, episode, request, Purpose::Sample).await?;
    let envelope = envelope(episode);
    let overridden = request.overridden.header();
    // Of several replies, or one with its tokens, nothing is sent before the end.
    let shows_text = wire.streams() && wire.replies() == 1 && !request.logprobs;
    let (sink, text) = shows_text.then(TextSink::new).unzip();
    let sampling = sampling(episode, request, wire.replies(), sink);
    if !wire.streams() {
        let replies = sampling.await?;
        wire.store(&envelope, &replies, episode.stored());
        let body = Bytes::from(wire.reply(&envelope, &replies).to_string());
        let body = Body::from_stream(Frames::of(vec![body], replies, connection).stream());
        return Ok(with_headers(body, "application/json", &envelope, overridden));
    }
    let keep_alive = options.keep_alive;
    let mut live = Live {
        wire,
        episode: episode.clone(),
        envelope: envelope.clone(),
        sampling,
        text,
        keep_alive,
        sent: Sent::default(),
        connection,
    };
    // An error that comes soon has its status; later the stream has begun.
    let frames = match live.next().await {
        Next::Ended(result) => live.last(Ok(result?)).stream().boxed(),
        Next::Frame(first) => stream::iter([Ok(first)]).chain(live.stream()).boxed(),
    };
    Ok(with_headers(Body::from_stream(frames), "text/event-stream", &envelope, overridden))
}

/// The connection of a request, if it holds the receipts of its replies.
pub(crate) fn connection_of(request: &Request) -> Option<Unconfirmed> {
    request.extensions().get().cloned()
}

/// The metadata of a reply: id, model and creation time.
pub(crate) fn envelope(episode: &Episode) -> Envelope {
    Envelope {
        id: uuid::Uuid::now_v7().simple().to_string(),
        created: unix_micros().div_euclid(1_000_000),
        model: episode.sampler().model().to_owned(),
    }
}

/// Checks and parses a request.
async fn read<W: Wire>(
    options: &GatewayOptions,
    episode: &Episode,
    request: Request,
    purpose: Purpose,
) -> Result<(SampleRequest, W), Problem> {
    let (body, repeats) = body_of(options, episode, request).await?;
    let (mut request, wire) = W::parse(&body, purpose)?;
    wire.recall(&mut request, episode.stored())?;
    request.repeats = repeats;
    if episode.sampler().honours_sampling() {
        request.sampling.check("")?;
        request.overridden.honour_sampling();
    }
    if request.thinking.is_some_and(|wanted| !episode.sampler().switches_thinking(wanted)) {
        request.overridden.add_thinking();
    }
    if !request.tools.is_empty() && !episode.sampler().shows_tools() {
        request.overridden.add_tools();
    }
    Ok((request, wire))
}

/// Checks a request. Returns its body, and whether the client's library marks it as a retry.
pub(crate) async fn body_of(
    options: &GatewayOptions,
    episode: &Episode,
    request: Request,
) -> Result<(Bytes, bool), Problem> {
    let (parts, body) = request.into_parts();
    episode.check_key(&parts.headers)?;
    check_encoding(&parts.headers)?;
    let limit = options.body_limit;
    let too_large =
        || Problem::new(Kind::TooLarge, format!("the body is larger than {limit} bytes"));
    let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    if length.and_then(|length| length.parse().ok()).is_some_and(|length: usize| length > limit) {
        return Err(too_large());
    }
    // The error says no more than this: a broken connection gets no reply.
    let body = to_bytes(body, limit).await.map_err(|_| too_large())?;
    let retries = parts.headers.get("x-stainless-retry-count");
    Ok((body, retries.is_some_and(|count| count != "0")))
}

fn check_encoding(headers: &HeaderMap) -> Result<(), Problem> {
    match headers.get(header::CONTENT_ENCODING) {
        Some(encoding) if encoding != "identity" => {
            Err(Problem::new(Kind::Encoding, "compressed bodies are not supported"))
        }
        _ => Ok(()),
    }
}

/// The end of a stream whose text was contradicted.
const CONTRADICTION: &str = "the engine failed in the middle of this reply, and the reply that was \
                             sampled instead begins differently; send the request again";

type Sampling = BoxFuture<'static, Result<Vec<Sampled>, SampleError>>;

/// All replies to a request; dropped with the connection.
fn sampling(
    episode: &Episode,
    request: SampleRequest,
    replies: usize,
    mut text: Option<TextSink>,
) -> Sampling {
    let sampler = Arc::clone(episode.sampler());
    let request = Arc::new(request);
    let all = async move {
        let sample = |index| sampler.sample(&request, index, text.take());
        try_join_all((0..replies).map(sample)).await
    };
    all.boxed()
}

pub(crate) fn with_headers(
    body: Body,
    content_type: &'static str,
    envelope: &Envelope,
    overridden: Option<String>,
) -> Response {
    let id = format!("req_{}", envelope.id);
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "no-cache"),
        // The names of the two vendors.
        (HeaderName::from_static("x-request-id"), id.as_str()),
        (HeaderName::from_static("request-id"), id.as_str()),
    ];
    let mut response = (headers, body).into_response();
    if let Some(Ok(overridden)) = overridden.map(HeaderValue::try_from) {
        response.headers_mut().insert(HeaderName::from_static(fields::HEADER), overridden);
    }
    response
}

/// What is left to send of a reply, and who is told at its end.
#[derive(Debug)]
pub(crate) struct Frames {
    unsent: std::vec::IntoIter<Bytes>,
    receipts: Vec<Receipt>,
    /// Holds the receipts once everything is sent; without it, they are delivered then.
    connection: Option<Unconfirmed>,
}

impl Frames {
    pub(crate) fn new(
        frames: Vec<Bytes>,
        receipts: Vec<Receipt>,
        connection: Option<Unconfirmed>,
    ) -> Self {
        Self { unsent: frames.into_iter(), receipts, connection }
    }

    fn of(frames: Vec<Bytes>, replies: Vec<Sampled>, connection: Option<Unconfirmed>) -> Self {
        Self::new(frames, replies.into_iter().map(|reply| reply.receipt).collect(), connection)
    }

    /// The next frame. The connection asks for one after the last when it has taken that one.
    fn next(&mut self) -> Option<Bytes> {
        let next = self.unsent.next();
        if next.is_none() {
            for receipt in self.receipts.drain(..) {
                match &self.connection {
                    Some(connection) => connection.hold(receipt),
                    None => receipt.delivered(),
                }
            }
        }
        next
    }

    pub(crate) fn stream(self) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
        stream::unfold(self, async |mut frames| Some((Ok(frames.next()?), frames)))
    }
}

/// A stream whose reply is being sampled.
struct Live<W> {
    wire: W,
    episode: Episode,
    envelope: Envelope,
    sampling: Sampling,
    /// The text so far; `None` if it is only sent at the end.
    text: Option<ShownText>,
    keep_alive: Duration,
    sent: Sent,
    connection: Option<Unconfirmed>,
}

/// What a [`Live`] stream does next.
enum Next {
    /// It sends text or a keep-alive.
    Frame(Bytes),
    Ended(Result<Vec<Sampled>, SampleError>),
}

enum Stage<W> {
    Live(Box<Live<W>>),
    Sending(Frames),
}

impl<W: Wire> Live<W> {
    /// Waits for new text, the end of sampling, or the time of a keep-alive. May be dropped and called
    /// again.
    async fn next(&mut self) -> Next {
        let mut silence = pin!(sleep(self.keep_alive));
        loop {
            // All branches wait for something that is still there at the next call.
            select! {
                biased;
                result = &mut self.sampling => return Next::Ended(result),
                is_open = changed(self.text.as_mut()) => {
                    if !is_open {
                        self.text = None;
                    } else if let Some(frame) = self.new_text() {
                        return Next::Frame(frame);
                    }
                }
                () = &mut silence => {
                    let frame = self.wire.keep_alive(&self.envelope, self.sent.events);
                    self.sent.events += 1;
                    return Next::Frame(frame);
                }
            }
        }
    }

    /// The events of new text. None if it does not continue what was sent: then the reply decides.
    fn new_text(&mut self) -> Option<Bytes> {
        let text = self.text.as_mut()?.now();
        let is_longer = text.content.len() > self.sent.content.len()
            || text.reasoning.len() > self.sent.reasoning.len();
        if !is_longer || !self.sent.is_continued_by(&text.reasoning, &text.content) {
            return None;
        }
        let events = self.wire.text(&self.envelope, &self.sent, &text);
        self.sent.add(events.len(), &text);
        Some(Bytes::from(events.concat()))
    }

    /// What is left to send once sampling has ended.
    fn last(&self, result: Result<Vec<Sampled>, SampleError>) -> Frames {
        let problem = match result {
            Ok(replies) if replies.iter().all(|reply| self.sent.is_continued_by_reply(reply)) => {
                let events = self.wire.events(&self.envelope, &self.sent, &replies);
                self.wire.store(&self.envelope, &replies, self.episode.stored());
                let connection = self.connection.clone();
                return Frames::of(vec![Bytes::from(events.concat())], replies, connection);
            }
            // Without its receipt, the reply is owed to a client that sends the request again.
            Ok(_) => Problem::new(Kind::Unavailable, CONTRADICTION),
            Err(error) => Problem::from(error),
        };
        note(&self.episode, &problem);
        let events = self.wire.late_error(&self.envelope, &self.sent, &problem);
        Frames::new(vec![Bytes::from(events.concat())], Vec::new(), None)
    }

    fn stream(self) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
        stream::unfold(Stage::Live(Box::new(self)), async |stage| {
            let mut frames = match stage {
                Stage::Sending(frames) => frames,
                Stage::Live(mut live) => match live.next().await {
                    Next::Frame(frame) => return Some((Ok(frame), Stage::Live(live))),
                    Next::Ended(result) => live.last(result),
                },
            };
            Some((Ok(frames.next()?), Stage::Sending(frames)))
        })
    }
}

/// Waits for new text; `false` if there will be none.
async fn changed(text: Option<&mut ShownText>) -> bool {
    match text {
        Some(text) => text.changed().await,
        None => std::future::pending().await,
    }
}
