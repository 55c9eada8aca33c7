//! Dialects: the form of requests and replies, and the control routes, which differ between servers.

use crate::api::EngineInfo;
use crate::capability::CapabilityFinding;
use crate::error::{EngineError, EngineErrorKind};
use crate::http::Server;
use crate::reply::{CheckedReply, ExpectedReply};
use crate::request::{GenerateRequest, TokenPrompt};
use camino::Utf8Path;
use orchestrate_types::{ModelShape, RequestId};
use std::fmt::Debug;
use std::time::Duration;

/// The HTTP form of one engine family. Implemented by [`crate::Sglang`] and [`crate::Vllm`].
pub trait Dialect: Debug + Send + Sync + Sized + 'static {
    /// Route that samples.
    const GENERATE: &'static str;
    /// Header that names the data-parallel rank, for servers that do not read it from the body.
    const RANK_HEADER: Option<&'static str>;
    /// Whether a streamed reply repeats in each frame what was sampled so far, so that the last frame is
    /// the whole reply. Replies of other servers are not streamed.
    const STREAMS: bool;

    /// The JSON body of a request that samples. `prompt` is the request's prompt.
    fn body(request: &GenerateRequest, prompt: &TokenPrompt, options: &GenerateOptions) -> String;

    /// Parses and checks a successful reply in full.
    ///
    /// # Errors
    /// The first field that is wrong, and why.
    fn read(body: &[u8], expected: &ExpectedReply) -> Result<CheckedReply, EngineErrorKind>;

    /// Asks what the server is and can do, without sampling.
    fn capabilities(
        server: &Server,
        shape: &ModelShape,
    ) -> impl Future<Output = Result<Capabilities, EngineError>> + Send;

    /// Aborts running requests, which return what they have, and holds back new ones.
    fn pause(
        server: &Server,
        timeout: Duration,
    ) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Loads a checkpoint under the name `version`, clears the KV cache, and verifies the name.
    fn load(
        server: &Server,
        checkpoint: &Utf8Path,
        version: &str,
        timeout: Duration,
    ) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Continues after [`Dialect::pause`].
    fn resume(server: &Server) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Aborts one request. An unknown request is not an error.
    fn abort(
        server: &Server,
        request_id: &RequestId,
    ) -> impl Future<Output = Result<(), EngineError>> + Send;
}

/// How a request is sent to this server.
#[derive(Debug)]
pub struct GenerateOptions {
    /// Maximum number of tokens to sample; not more than the context has room for.
    pub max_new_tokens: usize,
    /// Whether to send the priority. Servers refuse it unless they were started for priorities.
    pub send_priority: bool,
    /// The data-parallel rank that is to answer; `None` leaves the choice to the server.
    pub rank: Option<usize>,
    /// Whether the reply is to be streamed.
    pub stream: bool,
}

/// Properties of a server, as it reports them.
#[derive(Debug)]
pub struct Capabilities {
    /// The properties that every engine has.
    pub info: EngineInfo,
    /// Unsupported or doubtful properties.
    pub findings: Vec<CapabilityFinding>,
    /// Further facts for display, as `(name, value)`.
    pub facts: Vec<(&'static str, String)>,
    /// Whether it supports priorities, higher first.
    pub priorities: bool,
    /// Whether it was set to stream new tokens alone, against [`Dialect::STREAMS`].
    pub streams_increments: bool,
    /// Data-parallel ranks that a request can name, at least 1.
    pub ranks: usize,
}
