//! Workers behind one name.

use crate::{EngineError, EngineErrorKind};
use std::collections::BTreeSet;
use std::time::Duration;

const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);

/// The base URLs of all servers that the host of `url` stands for: one for each of its addresses,
/// in order of address. Asks the system's resolver once.
///
/// # Errors
/// [`EngineErrorKind::Unfit`] for a URL that is no plain `http` one (certificates are for names,
/// not addresses), [`EngineErrorKind::Unreachable`] when the name has no address.
pub async fn discover(url: &str) -> Result<Vec<String>, EngineError> {
    let error = |kind| EngineError { engine: url.to_owned(), call: "discover", kind };
    let unfit = |words: &str| error(EngineErrorKind::Unfit(words.to_owned()));
    let parsed = reqwest::Url::parse(url).map_err(|_| unfit("it is not a URL"))?;
    let (Some(host), Some(port), "http") =
        (parsed.host_str(), parsed.port_or_known_default(), parsed.scheme())
    else {
        return Err(unfit("servers are found by http:// and a host name"));
    };
    // The URL's form of an IPv6 address has brackets.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let found = tokio::time::timeout(LOOKUP_TIMEOUT, tokio::net::lookup_host((host, port)))
        .await
        .map_err(|_| error(EngineErrorKind::TimedOut(LOOKUP_TIMEOUT)))?
        .map_err(|words| error(EngineErrorKind::Unreachable(words.to_string())))?;
    let addresses: BTreeSet<_> = found.collect();
    if addresses.is_empty() {
        return Err(error(EngineErrorKind::Unreachable("its name has no address".to_owned())));
    }
    Ok(addresses.into_iter().map(|address| format!("http://{address}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_address_of_a_name_is_a_worker() {
        let found = discover("http://127.0.0.1:30000/").await.unwrap();
        assert_eq!(found, ["http://127.0.0.1:30000"]);
        let found = discover("http://[::1]:7").await.unwrap();
        assert_eq!(found, ["http://[::1]:7"]);
        let local = discover("http://localhost:7").await.unwrap();
        assert!(local.contains(&"http://127.0.0.1:7".to_owned()), "{local:?}");
    }

    #[tokio::test]
    async fn what_cannot_be_looked_up_is_refused() {
        for url in ["https://localhost:7", "localhost", "unix:/tmp/x"] {
            let error = discover(url).await.unwrap_err();
            assert!(matches!(error.kind, EngineErrorKind::Unfit(_)), "{url}: {error}");
        }
    }
}
