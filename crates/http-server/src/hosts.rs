//! By which hosts a request may address the server, and which pages may send one.

use crate::denial::Denial;
use crate::options::HttpOptions;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri, header};
use std::net::{IpAddr, SocketAddr};

/// Hosts by which requests may address a server. A web page whose name resolves to this machine
/// (DNS rebinding) addresses it by that name, and is denied.
#[derive(Debug)]
pub(crate) enum AllowedHosts {
    Any,
    Listed { bound: IpAddr, names: Vec<String> },
}

impl AllowedHosts {
    pub(crate) fn new(options: &HttpOptions, address: SocketAddr) -> Self {
        if options.any_host(address) {
            return Self::Any;
        }
        let names = options.allowed_hosts.iter().map(|name| name.to_ascii_lowercase());
        Self::Listed { bound: address.ip(), names: names.collect() }
    }

    /// Checks the host that a request addresses.
    pub(crate) fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Denial> {
        let mut hosts = headers.get_all(header::HOST).into_iter();
        let (host, more) = (hosts.next(), hosts.next());
        let host = host.filter(|_| more.is_none()).ok_or(Denial::MissingHost)?;
        let text = String::from_utf8_lossy(host.as_bytes());
        let denied = || Denial::Host(text.chars().take(100).collect());
        let authority: Authority = text.parse().map_err(|_| denied())?;
        let named = [Some(&authority), uri.authority()];
        if named.into_iter().flatten().all(|authority| self.allows(authority.host())) {
            Ok(())
        } else {
            Err(denied())
        }
    }

    fn allows(&self, host: &str) -> bool {
        let (bound, names) = match self {
            Self::Any => return true,
            Self::Listed { bound, names } => (bound, names),
        };
        let literal = host.trim_start_matches('[').trim_end_matches(']');
        if let Ok(ip) = literal.parse::<IpAddr>() {
            return !bound.is_loopback() || ip.is_loopback() || ip == *bound;
        }
        let name = host.to_ascii_lowercase();
        name == "localhost" || names.contains(&name)
    }
}

/// Denies a request that a browser sends for a page of another site.
pub(crate) fn check_origin(headers: &HeaderMap) -> Result<(), Denial> {
    let bytes = |name: &str| headers.get(name).map(|value| value.as_bytes().to_ascii_lowercase());
    if bytes("sec-fetch-site").is_some_and(|site| site != b"same-origin" && site != b"none") {
        return Err(Denial::CrossSite);
    }
    let Some(origin) = bytes("origin") else { return Ok(()) };
    let host = bytes("host").unwrap_or_default();
    let of_origin = origin.strip_prefix(b"http://").or_else(|| origin.strip_prefix(b"https://"));
    if of_origin == Some(host.as_slice()) { Ok(()) } else { Err(Denial::CrossSite) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    fn allows(options: &HttpOptions, address: &str, host: &str) -> bool {
        let hosts = AllowedHosts::new(options, address.parse().unwrap());
        hosts.check(&Uri::from_static("/generate"), &headers(&[("host", host)])).is_ok()
    }

    #[test]
    fn loopback_servers_answer_to_loopback_hosts_only() {
        let plain = HttpOptions::default();
        for host in ["127.0.0.1:30000", "localhost", "LocalHost:1", "[::1]:1", "127.8.8.8"] {
            assert!(allows(&plain, "127.0.0.1:1", host), "{host}");
        }
        for host in ["evil.example", "10.0.0.1", "localhost.evil.example:1", "[::2]", "", "a b"] {
            assert!(!allows(&plain, "127.0.0.1:1", host), "{host}");
        }
        let token = HttpOptions { token: Some("t".into()), ..Default::default() };
        assert!(!allows(&token, "127.0.0.1:1", "evil.example"));
        let named = HttpOptions { allowed_hosts: vec!["Engine".into()], ..Default::default() };
        assert!(allows(&named, "127.0.0.1:1", "engine:30000"));
    }

    #[test]
    fn open_servers_answer_to_any_host_if_they_need_a_secret() {
        let token = HttpOptions { token: Some("t".into()), ..Default::default() };
        assert!(allows(&token, "0.0.0.0:1", "engine-7:30000"));
        let listed = HttpOptions { allowed_hosts: vec!["engine-7".into()], ..token };
        assert!(allows(&listed, "0.0.0.0:1", "engine-7") && !allows(&listed, "0.0.0.0:1", "other"));
        let open = HttpOptions { insecure: true, ..Default::default() };
        assert!(allows(&open, "0.0.0.0:1", "10.0.0.1:1") && !allows(&open, "0.0.0.0:1", "evil"));
    }

    #[test]
    fn a_request_names_one_host_in_url_and_header() {
        let hosts = AllowedHosts::new(&HttpOptions::default(), "127.0.0.1:1".parse().unwrap());
        let uri = Uri::from_static("/");
        assert_eq!(hosts.check(&uri, &HeaderMap::new()), Err(Denial::MissingHost));
        let twice = headers(&[("host", "localhost"), ("host", "localhost")]);
        assert_eq!(hosts.check(&uri, &twice), Err(Denial::MissingHost));
        let absolute = Uri::from_static("http://evil.example/generate");
        let one = headers(&[("host", "localhost")]);
        assert!(matches!(hosts.check(&absolute, &one), Err(Denial::Host(_))));
    }

    #[test]
    fn pages_of_other_sites_are_denied() {
        let with = |name, value| check_origin(&headers(&[("host", "localhost:1"), (name, value)]));
        assert!(with("origin", "http://localhost:1").is_ok());
        assert!(with("sec-fetch-site", "same-origin").is_ok());
        for (name, value) in [
            ("origin", "http://evil.example"),
            ("origin", "http://localhost:2"),
            ("origin", "null"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            assert_eq!(with(name, value), Err(Denial::CrossSite), "{name}: {value}");
        }
    }
}
