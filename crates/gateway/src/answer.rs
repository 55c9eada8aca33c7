//! From an HTTP request to its reply: body, sampling, keep-alives, and the receipt.

use crate::episode::Episode;
use crate::options::GatewayOptions;
use crate::problem::{Kind, Problem};
use crate::sampler::{Receipt, SampleError, SampleRequest, Sampled};
use crate::wire::{Envelope, Purpose, Wire};
use axum::body::{Body, to_bytes};
use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, HeaderName, header};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt as _, try_join_all};
use futures::stream::{self, Stream, StreamExt as _};
use orchestrate_types::unix_micros;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Samples.
pub(crate) async fn sample<W: Wire>(
    State(options): State<Arc<GatewayOptions>>,
    Extension(episode): Extension<Episode>,
    request: Request,
) -> Response {
    match try_sample::<W>(&options, &episode, request).await {
        Ok(response) => response,
        Err(problem) => problem.response(W::DIALECT),
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
    let (request, wire) = read::<W>(options, episode, request, Purpose::Sample).await?;
    let envelope = envelope(episode);
    let mut sampling = sampling(episode, request, wire.replies());
    if !wire.streams() {
        let replies = sampling.await?;
        let body = Bytes::from(wire.reply(&envelope, &replies).to_string());
        let body = Body::from_stream(Frames::of(vec![body], replies).stream());
        return Ok(with_headers(body, "application/json", &envelope));
    }
    // A reply or an error that comes soon has its status; later the stream has begun.
    let frames = if let Ok(replies) = timeout(options.keep_alive, &mut sampling).await {
        let replies = replies?;
        Frames::of(wire.events(&envelope, 0, &replies), replies).stream().boxed()
    } else {
        let first = wire.keep_alive(&envelope, 0);
        let (envelope, keep_alive) = (envelope.clone(), options.keep_alive);
        let waiting = Waiting { wire, envelope, sampling, keep_alive, sent: 1 };
        stream::iter([Ok(first)]).chain(waiting.stream()).boxed()
    };
    Ok(with_headers(Body::from_stream(frames), "text/event-stream", &envelope))
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
    request.repeats = repeats;
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

type Sampling = BoxFuture<'static, Result<Vec<Sampled>, SampleError>>;

/// All replies to a request; dropped with the connection.
fn sampling(episode: &Episode, request: SampleRequest, replies: usize) -> Sampling {
    let sampler = Arc::clone(episode.sampler());
    let request = Arc::new(request);
    let all = async move {
        try_join_all((0..replies).map(|index| sampler.sample(&request, index))).await
    };
    all.boxed()
}

pub(crate) fn with_headers(
    body: Body,
    content_type: &'static str,
    envelope: &Envelope,
) -> Response {
    let id = format!("req_{}", envelope.id);
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "no-cache"),
        // The names of the two vendors.
        (HeaderName::from_static("x-request-id"), id.as_str()),
        (HeaderName::from_static("request-id"), id.as_str()),
    ];
    (headers, body).into_response()
}

/// What is left to send of a reply, and who is told at its end.
#[derive(Debug)]
pub(crate) struct Frames {
    frames: std::vec::IntoIter<Bytes>,
    receipts: Vec<Receipt>,
}

impl Frames {
    pub(crate) fn new(frames: Vec<Bytes>, receipts: Vec<Receipt>) -> Self {
        Self { frames: frames.into_iter(), receipts }
    }

    fn of(frames: Vec<Bytes>, replies: Vec<Sampled>) -> Self {
        Self::new(frames, replies.into_iter().map(|reply| reply.receipt).collect())
    }

    /// The next frame. The connection asks for one after the last when it has taken that one.
    fn next(&mut self) -> Option<Bytes> {
        let next = self.frames.next();
        if next.is_none() {
            self.receipts.drain(..).for_each(Receipt::delivered);
        }
        next
    }

    pub(crate) fn stream(self) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
        stream::unfold(self, async |mut frames| Some((Ok(frames.next()?), frames)))
    }
}

/// A stream that began before its reply.
struct Waiting<W> {
    wire: W,
    envelope: Envelope,
    sampling: Sampling,
    keep_alive: Duration,
    /// Keep-alives so far.
    sent: usize,
}

enum Stage<W> {
    Waiting(Waiting<W>),
    Sending(Frames),
}

impl<W: Wire> Waiting<W> {
    fn stream(self) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
        stream::unfold(Stage::Waiting(self), async |stage| {
            let mut frames = match stage {
                Stage::Sending(frames) => frames,
                Stage::Waiting(mut waiting) => {
                    let Ok(result) = timeout(waiting.keep_alive, &mut waiting.sampling).await
                    else {
                        let frame = waiting.wire.keep_alive(&waiting.envelope, waiting.sent);
                        waiting.sent += 1;
                        return Some((Ok(frame), Stage::Waiting(waiting)));
                    };
                    waiting.frames(result)
                }
            };
            Some((Ok(frames.next()?), Stage::Sending(frames)))
        })
    }

    fn frames(&self, result: Result<Vec<Sampled>, SampleError>) -> Frames {
        match result {
            Ok(replies) => {
                Frames::of(self.wire.events(&self.envelope, self.sent, &replies), replies)
            }
            Err(error) => {
                let problem = Problem::from(error);
                Frames::of(self.wire.late_error(&self.envelope, self.sent, &problem), Vec::new())
            }
        }
    }
}
