//! One Docker host: its settings, and how to connect to its daemon.

use orchestrate_settings::{Range, between, settings};
use orchestrate_types::has_credentials;
use std::num::ParseIntError;
use std::path::PathBuf;

/// Default socket of a Docker daemon.
const DEFAULT_SOCKET: &str = "/var/run/docker.sock";
/// Docker's names of the files in a folder of certificates.
pub(crate) const CERTIFICATE_FILES: [&str; 3] = ["ca.pem", "cert.pem", "key.pem"];

settings! {
    /// One of several Docker hosts: `[[sandbox.hosts]]`.
    #[derive(Eq)]
    [sandbox.hosts] pub DockerHostSection -> DockerHost;

    /// Address of its daemon: `unix:///var/run/docker.sock`, `tcp://host:2376`,
    /// `https://host:2376`, `http://host:2375`, or `ssh://user@host`, where a port and the path of
    /// the socket may follow.
    url: String = String::new() => "required";
    /// Name in messages and metrics.
    name: Option<String> = None => "the address";
    /// Containers alive at once on this host.
    max_containers: Option<usize> = None => "`sandbox.max_containers`", containers();
    /// Folder with `ca.pem`, `cert.pem` and `key.pem`, as in Docker's `DOCKER_CERT_PATH`. With it
    /// `tcp://` uses TLS; `https://` requires it.
    certificates: Option<String> = None => "none";
    /// File that `ssh` reads instead of the user's configuration (its option -F).
    ssh_config: Option<String> = None => "the user's configuration";
}

/// How many containers may be alive at once on one host.
pub(crate) fn containers() -> Range<usize> {
    between(2, 4096).hint("an agent and its grader are two")
}

/// Why a host's URL is invalid. The message completes `sandbox.docker_host = <url>: `.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HostUrlError {
    #[error(
        "must not contain a password: ssh uses keys (ssh_config), tcp and https use certificates"
    )]
    Password,
    #[error("must be an ssh:// URL, because ssh_config is set")]
    SshConfigWithoutSsh,
    #[error(
        "must have certificates: set certificates or DOCKER_CERT_PATH to the folder with {}",
        CERTIFICATE_FILES.join(", ")
    )]
    MissingCertificates,
    #[error("must be a tcp:// or https:// URL, because certificates is set")]
    UnexpectedCertificates,
    #[error("must have a port from 0 to 65535, not `{port}`")]
    InvalidPort { port: String, source: ParseIntError },
    #[error(
        "must look like ssh://user@host, ssh://host:port or ssh://user@host/path/of/docker.sock"
    )]
    InvalidSshAddress,
    #[error("must start with unix://, tcp://, http://, https:// or ssh://")]
    UnknownScheme,
}

/// How to connect to a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Transport {
    /// A socket of this machine or an unencrypted connection, as the URL says.
    Plain,
    /// TLS, with the certificates in this folder.
    Tls(PathBuf),
    /// A socket of another machine, forwarded through `ssh`.
    Ssh(Destination),
}

/// Where `ssh` connects to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Destination {
    /// `host` or `user@host`.
    pub(crate) login: String,
    pub(crate) port: Option<u16>,
    /// Path of the daemon's socket on that machine.
    pub(crate) socket: String,
    pub(crate) config: Option<String>,
}

impl DockerHost {
    /// The host named by a single setting, else by the environment as Docker's own command reads
    /// it, else this machine.
    pub(crate) fn single(setting: Option<&str>) -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let url = setting.map(str::to_owned).or_else(|| variable("DOCKER_HOST"));
        let url = url.unwrap_or_else(|| format!("unix://{DEFAULT_SOCKET}"));
        let wants_tls = url.starts_with("https://")
            || (url.starts_with("tcp://") && variable("DOCKER_TLS_VERIFY").is_some());
        let folder = || {
            variable("DOCKER_CERT_PATH")
                .or_else(|| variable("HOME").map(|home| format!("{home}/.docker")))
        };
        let certificates = if wants_tls { folder() } else { None };
        Self { url, name: None, max_containers: None, certificates, ssh_config: None }
    }

    /// Its name in messages and metrics: the configured name, else the URL.
    pub fn title(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.url)
    }

    /// Whether its daemon listens on a socket of this machine.
    pub(crate) fn is_local(&self) -> bool {
        self.url.starts_with("unix://")
    }

    /// How to connect to it.
    pub(crate) fn transport(&self) -> Result<Transport, HostUrlError> {
        if has_credentials(&self.url) {
            return Err(HostUrlError::Password);
        }
        let (scheme, rest) = self.url.split_once("://").unwrap_or(("", &self.url));
        let folder = self.certificates.as_ref().map(PathBuf::from);
        if self.ssh_config.is_some() && scheme != "ssh" {
            return Err(HostUrlError::SshConfigWithoutSsh);
        }
        match (scheme, folder) {
            ("tcp" | "https", Some(folder)) => Ok(Transport::Tls(folder)),
            ("https", None) => Err(HostUrlError::MissingCertificates),
            ("unix" | "http" | "ssh", Some(_)) => Err(HostUrlError::UnexpectedCertificates),
            ("unix" | "tcp" | "http", None) => Ok(Transport::Plain),
            ("ssh", None) => self.destination(rest).map(Transport::Ssh),
            _ => Err(HostUrlError::UnknownScheme),
        }
    }

    fn destination(&self, rest: &str) -> Result<Destination, HostUrlError> {
        let (authority, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        let (login, port) = match authority.rsplit_once(':') {
            // The last colon of an address in brackets belongs to the address.
            Some((login, port)) if !port.ends_with(']') => {
                let number = port.parse().map_err(|source| HostUrlError::InvalidPort {
                    port: port.to_owned(),
                    source,
                })?;
                (login, Some(number))
            }
            Some(_) | None => (authority, None),
        };
        let is_plain = |part: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "._-:[]%".contains(c);
            !part.is_empty() && !part.starts_with('-') && part.chars().all(allowed)
        };
        let (user, host) = match login.split_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, login),
        };
        // `ssh` would read an argument that starts with a dash as an option; passwords are not
        // supported.
        if !is_plain(host) || user.is_some_and(|user| !is_plain(user) || user.contains(':')) {
            return Err(HostUrlError::InvalidSshAddress);
        }
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let login = user.map_or_else(|| host.to_owned(), |user| format!("{user}@{host}"));
        let socket = if path.len() > 1 { path } else { DEFAULT_SOCKET };
        Ok(Destination { login, port, socket: socket.to_owned(), config: self.ssh_config.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(url: &str, certificates: Option<&str>) -> DockerHost {
        DockerHost {
            url: url.into(),
            name: None,
            max_containers: None,
            certificates: certificates.map(str::to_owned),
            ssh_config: None,
        }
    }

    #[test]
    fn transport_follows_from_scheme_and_certificates() {
        let of = |url, certificates| host(url, certificates).transport();
        assert_eq!(of("unix:///x.sock", None), Ok(Transport::Plain));
        assert_eq!(of("tcp://h:2375", None), Ok(Transport::Plain));
        assert_eq!(of("tcp://h:2376", Some("/c")), Ok(Transport::Tls("/c".into())));
        assert_eq!(of("https://h:2376", Some("/c")), Ok(Transport::Tls("/c".into())));
        for (url, certificates) in [
            ("https://h:2376", None),
            ("http://h:2375", Some("/c")),
            ("unix:///x.sock", Some("/c")),
            ("fd://", None),
            ("/var/run/docker.sock", None),
        ] {
            assert!(of(url, certificates).is_err(), "{url}");
        }
    }

    #[test]
    fn ssh_url_yields_login_port_and_socket_but_never_an_option() {
        let of = |url: &str| match host(url, None).transport() {
            Ok(Transport::Ssh(to)) => Ok((to.login, to.port, to.socket)),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error),
        };
        let default = || DEFAULT_SOCKET.to_owned();
        assert_eq!(of("ssh://box"), Ok(("box".into(), None, default())));
        assert_eq!(of("ssh://me@box:22/"), Ok(("me@box".into(), Some(22), default())));
        assert_eq!(
            of("ssh://me@box/run/d.sock"),
            Ok(("me@box".into(), None, "/run/d.sock".into()))
        );
        assert_eq!(of("ssh://me@[::1]:2222"), Ok(("me@::1".into(), Some(2222), default())));
        assert_eq!(of("ssh://[fe80::1]"), Ok(("fe80::1".into(), None, default())));
        for bad in [
            "ssh://",
            "ssh://me@",
            "ssh://-oProxyCommand=x",
            "ssh://-x@box",
            "ssh://me:secret@box",
            "ssh://box;id",
            "ssh://box:x",
        ] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }
}
