//! Every code that an error reply can have, and to whom each is attributed.
//!
//! This is the one table by which the gateway, the runner and the Python clients decide what an error
//! means. Statuses and messages are for the vendors' libraries and for people.

use orchestrate_types::Attribution;

macro_rules! error_codes {
    ($($(#[$doc:meta])+ $variant:ident = $text:literal, $whose:expr;)+) => {
        /// The code of an error reply.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorCode {
            $($(#[$doc])+ $variant,)+
        }

        impl ErrorCode {
            /// All codes.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The code as it is sent.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }

            /// Who caused it. `None` if the episode is not, or no longer, the sender's, so that nothing
            /// it does counts.
            pub const fn attribution(self) -> Option<Attribution> {
                match self {
                    $(Self::$variant => $whose,)+
                }
            }
        }
    };
}

const POLICY: Option<Attribution> = Some(Attribution::Policy);
const ENVIRONMENT: Option<Attribution> = Some(Attribution::Environment);
const INFRASTRUCTURE: Option<Attribution> = Some(Attribution::Infrastructure);
const NOT_THE_SENDERS: Option<Attribution> = None;

error_codes! {
    /// The prompt leaves no room for a reply.
    ContextFull = "context_length_exceeded", POLICY;
    /// The episode has no generations or time left, or is over.
    EpisodeEnded = "episode_ended", POLICY;
    /// A field of a request is missing, wrong or cannot be honoured.
    InvalidRequest = "invalid_request", ENVIRONMENT;
    /// The request relies on a history that the server keeps.
    ThreadUnsupported = "thread_unsupported_request", ENVIRONMENT;
    /// The response that the request continues is not stored in this episode.
    UnknownResponse = "previous_response_not_found", ENVIRONMENT;
    /// The body is larger than any history that fits the context.
    RequestTooLarge = "request_too_large", POLICY;
    /// The body is compressed.
    EncodingUnsupported = "unsupported_encoding", ENVIRONMENT;
    /// The request does not have the episode's key.
    InvalidKey = "invalid_api_key", ENVIRONMENT;
    /// There is no such route below the episode's base URL.
    UnknownRoute = "unknown_route", ENVIRONMENT;
    /// Another model than the policy is asked for.
    UnknownModel = "model_not_found", ENVIRONMENT;
    /// The route has another method.
    WrongMethod = "method_not_allowed", ENVIRONMENT;
    /// There is no episode at this base URL: it is over, or never was.
    UnknownEpisode = "episode_unknown", NOT_THE_SENDERS;
    /// A passing failure; the request is to be sent again.
    Overloaded = "server_is_overloaded", INFRASTRUCTURE;
    /// The gateway or the engine failed.
    ServerError = "server_error", INFRASTRUCTURE;

    /// A worker's request is malformed.
    InvalidWorkerRequest = "invalid", ENVIRONMENT;
    /// Workers have no such route.
    NoRoute = "no_route", ENVIRONMENT;
    /// The lease has ended.
    LeaseOver = "lease_over", NOT_THE_SENDERS;
    /// No such lease is known.
    LeaseUnknown = "lease_unknown", NOT_THE_SENDERS;
    /// Another result was returned for this lease.
    OtherResult = "other_result", NOT_THE_SENDERS;
    /// The run has ended.
    RunOver = "run_over", NOT_THE_SENDERS;
    /// The result has arrived, but is not stored yet.
    NotStored = "not_stored", INFRASTRUCTURE;

    /// The workers' secret is missing or wrong.
    Unauthorized = "unauthorized", ENVIRONMENT;
    /// The request is not valid HTTP for this server.
    BadRequest = "bad_request", ENVIRONMENT;
    /// The host that the request names is not the server's.
    HostNotAllowed = "host_not_allowed", ENVIRONMENT;
    /// A browser sends the request for a page of another site.
    CrossSite = "cross_site", ENVIRONMENT;
    /// The body is not declared as JSON.
    ContentType = "content_type", ENVIRONMENT;
    /// A worker's body is too large.
    BodyTooLarge = "body_too_large", ENVIRONMENT;
    /// The body did not arrive in time.
    BodyTimedOut = "body_timed_out", INFRASTRUCTURE;
    /// Too many bodies are being received.
    Busy = "busy", INFRASTRUCTURE;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;

    fn whose(code: ErrorCode) -> &'static str {
        code.attribution().map_or("lease", Attribution::name)
    }

    /// A committed file, which `ORCHESTRATE_REGENERATE` writes again.
    fn is_current(file: &str, content: &str) {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
        if std::env::var_os("ORCHESTRATE_REGENERATE").is_some() {
            std::fs::write(&path, content).unwrap();
        }
        let remedy = "run ORCHESTRATE_REGENERATE=1 cargo nextest run -p orchestrate-gateway code";
        assert!(std::fs::read_to_string(&path).unwrap() == content, "{file} is stale: {remedy}");
    }

    #[test]
    fn the_python_client_has_the_same_table() {
        let mut text = String::from(concat!(
            "\"\"\"Every code of the gateway's errors, and to whom each is attributed.\n\n",
            "Generated by crates/gateway/src/code.rs.\n\"\"\"\n\n",
            "#: `policy`, `environment`, `infrastructure`, or `lease`: the episode is not, or no \
             longer, this\n#: worker's.\nATTRIBUTION = {\n",
        ));
        for code in ErrorCode::ALL {
            writeln!(text, "    \"{}\": \"{}\",", code.as_str(), whose(*code)).unwrap();
        }
        text.push_str("}\n");
        is_current("clients/python/orchestrate/codes.py", &text);
    }

    #[test]
    fn every_code_is_documented_with_whose_doing_it_is() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/outcomes.md");
        let page = std::fs::read_to_string(path).unwrap();
        for code in ErrorCode::ALL {
            let row = format!("| `{}` | {} |", code.as_str(), whose(*code));
            assert!(page.contains(&row), "docs/src/outcomes.md lacks {row}");
        }
    }

    #[test]
    fn codes_are_distinct_and_only_real_ends_are_the_policys() {
        let mut texts: Vec<&str> = ErrorCode::ALL.iter().map(|code| code.as_str()).collect();
        texts.sort_unstable();
        texts.dedup();
        assert_eq!(texts.len(), ErrorCode::ALL.len());
        let policys = ErrorCode::ALL.iter().filter(|code| code.attribution() == POLICY);
        let policys: Vec<&str> = policys.map(|code| code.as_str()).collect();
        assert_eq!(policys, ["context_length_exceeded", "episode_ended", "request_too_large"]);
    }
}
