//! What differs between the servers: how to ask, how to read, which routes control them.

use crate::http::Wire;
use crate::reply::{Expected, Fault, Reading};
use crate::{EngineError, EngineInfo, Finding, GenerateRequest};
use camino::Utf8Path;
use orchestrate_types::{ModelShape, RequestId};
use std::fmt::Debug;
use std::time::Duration;

/// The wire form of one kind of server. Implemented by [`crate::Sglang`] and [`crate::Vllm`].
pub trait Dialect: Debug + Send + Sync + Sized + 'static {
    /// Route that samples.
    const GENERATE: &'static str;
    /// Header that names the data-parallel rank, for servers that do not read it from the body.
    const RANK_HEADER: Option<&'static str>;

    /// The body of a request that samples, as JSON.
    fn body(request: &GenerateRequest, limits: &Limits) -> String;

    /// Checks a successful answer in full.
    ///
    /// # Errors
    /// The first thing that is wrong with it, by its field.
    fn read(body: &[u8], expected: &Expected) -> Result<Reading, Fault>;

    /// Asks what the server is, without sampling.
    fn survey(
        wire: &Wire,
        shape: &ModelShape,
    ) -> impl Future<Output = Result<Survey, EngineError>> + Send;

    /// Ends what is running, with what it has, and holds back what comes.
    fn pause(
        wire: &Wire,
        timeout: Duration,
    ) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Loads a checkpoint under the name `version`, forgets all KV, and checks the name.
    fn load(
        wire: &Wire,
        checkpoint: &Utf8Path,
        version: &str,
        timeout: Duration,
    ) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Goes on after [`Dialect::pause`].
    fn resume(wire: &Wire) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Aborts one request; an unknown one is no error.
    fn abort(
        wire: &Wire,
        request_id: &RequestId,
    ) -> impl Future<Output = Result<(), EngineError>> + Send;
}

/// What a request may ask of this server.
#[derive(Debug)]
pub struct Limits {
    /// Tokens to sample at most, cut to the room in the context.
    pub max_new_tokens: usize,
    /// Whether the server takes priorities; it refuses them unless it was started for them.
    pub priorities: bool,
    /// The data-parallel rank that is to answer; `None` leaves the choice to the server.
    pub rank: Option<usize>,
}

/// What a server said about itself.
#[derive(Debug)]
pub struct Survey {
    /// In the words of the seam.
    pub info: EngineInfo,
    /// What about it is unfit or doubtful for replay.
    pub findings: Vec<Finding>,
    /// Facts worth showing, as `(name, value)`.
    pub facts: Vec<(&'static str, String)>,
    /// Whether it takes priorities, larger first.
    pub priorities: bool,
    /// Data-parallel ranks that can be named in a request, at least 1.
    pub ranks: usize,
}
