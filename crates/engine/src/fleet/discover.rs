//! Discovery of workers by host name.

use crate::error::{EngineError, EngineErrorKind, ErrorDetail};
use std::collections::BTreeSet;
use std::time::Duration;

const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);

/// The base URLs of all servers behind the host name of `url`: one for each of its addresses, ordered
/// by address. Asks the system's resolver once.
///
/// # Errors
/// [`EngineErrorKind::Unsupported`] unless the URL is an `http` one with a host (certificates are
/// issued for names, not for addresses); [`EngineErrorKind::Unreachable`] if the name cannot be
/// resolved; [`EngineErrorKind::TimedOut`] if the resolver does not answer.
pub async fn discover(url: &str) -> Result<Vec<String>, EngineError> {
    let error = |kind| EngineError { engine: url.to_owned(), call: "discover", kind };
    let parsed = reqwest::Url::parse(url)
        .map_err(|_| error(EngineErrorKind::unsupported("not a valid URL")))?;
    let (Some(host), Some(port), "http") =
        (parsed.host_str(), parsed.port_or_known_default(), parsed.scheme())
    else {
        let message = "must start with http:// and have a host name";
        return Err(error(EngineErrorKind::unsupported(message)));
    };
    // In URLs IPv6 addresses are in brackets.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let found = tokio::time::timeout(LOOKUP_TIMEOUT, tokio::net::lookup_host((host, port)))
        .await
        .map_err(|_| error(EngineErrorKind::TimedOut(LOOKUP_TIMEOUT)))?
        .map_err(|cause| {
            let detail = ErrorDetail::caused_by("the host name cannot be resolved", cause);
            error(EngineErrorKind::Unreachable(detail))
        })?;
    let addresses: BTreeSet<_> = found.collect();
    if addresses.is_empty() {
        return Err(error(EngineErrorKind::unreachable("the host name has no address")));
    }
    Ok(addresses.into_iter().map(|address| format!("http://{address}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_address_of_a_host_name_is_a_worker() {
        let found = discover("http://127.0.0.1:30000/").await.unwrap();
        assert_eq!(found, ["http://127.0.0.1:30000"]);
        let found = discover("http://[::1]:7").await.unwrap();
        assert_eq!(found, ["http://[::1]:7"]);
        let local = discover("http://localhost:7").await.unwrap();
        assert!(local.contains(&"http://127.0.0.1:7".to_owned()), "{local:?}");
    }

    #[tokio::test]
    async fn urls_other_than_http_are_refused() {
        for url in ["https://localhost:7", "localhost", "unix:/tmp/x"] {
            let error = discover(url).await.unwrap_err();
            assert!(matches!(error.kind, EngineErrorKind::Unsupported(_)), "{url}: {error}");
        }
    }
}
