//! One Docker host: what the settings say about it, and how its daemon is reached.

use crate::config::containers;
use orchestrate_settings::settings;
use std::path::PathBuf;

/// Where the daemon of this machine usually listens.
const USUAL_SOCKET: &str = "/var/run/docker.sock";
/// What stands in a folder of certificates, by Docker's own names.
pub(crate) const CERTIFICATES: [&str; 3] = ["ca.pem", "cert.pem", "key.pem"];

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

/// How a daemon is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Transport {
    /// A socket of this machine, or a plain connection: whatever the URL says.
    Plain,
    /// TLS, with the certificates in this folder.
    Tls(PathBuf),
    /// A socket of another machine, through `ssh`.
    Ssh(Destination),
}

/// What `ssh` is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Destination {
    /// `host` or `user@host`.
    pub(crate) login: String,
    pub(crate) port: Option<u16>,
    /// The daemon's socket there.
    pub(crate) socket: String,
    pub(crate) config: Option<String>,
}

impl DockerHost {
    /// The host of `docker_host`; without one that of the environment, read as the `docker` command
    /// reads it, else this machine's.
    pub(crate) fn single(setting: Option<&str>) -> Self {
        let of = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let url = setting.map(str::to_owned).or_else(|| of("DOCKER_HOST"));
        let url = url.unwrap_or_else(|| format!("unix://{USUAL_SOCKET}"));
        let wants_tls = url.starts_with("https://")
            || (url.starts_with("tcp://") && of("DOCKER_TLS_VERIFY").is_some());
        let folder =
            || of("DOCKER_CERT_PATH").or_else(|| of("HOME").map(|home| format!("{home}/.docker")));
        let certificates = if wants_tls { folder() } else { None };
        Self { url, name: None, max_containers: None, certificates, ssh_config: None }
    }

    /// Its name in messages and metrics.
    pub fn title(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.url)
    }

    /// Whether its daemon listens on a socket of this machine.
    pub(crate) fn is_local(&self) -> bool {
        self.url.starts_with("unix://")
    }

    /// How the daemon is reached.
    ///
    /// # Errors
    /// What the address must be instead.
    pub(crate) fn transport(&self) -> Result<Transport, String> {
        let (scheme, rest) = self.url.split_once("://").unwrap_or(("", &self.url));
        let folder = self.certificates.as_ref().map(PathBuf::from);
        if self.ssh_config.is_some() && scheme != "ssh" {
            return Err("must start with ssh:// when ssh_config is set".to_owned());
        }
        match (scheme, folder) {
            ("tcp" | "https", Some(folder)) => Ok(Transport::Tls(folder)),
            ("https", None) => Err(format!(
                "must have certificates (or DOCKER_CERT_PATH), a folder with {}",
                CERTIFICATES.join(", ")
            )),
            ("unix" | "http" | "ssh", Some(_)) => {
                Err("must start with tcp:// or https:// when certificates is set".to_owned())
            }
            ("unix" | "tcp" | "http", None) => Ok(Transport::Plain),
            ("ssh", None) => self.destination(rest).map(Transport::Ssh),
            _ => Err("must start with unix://, tcp://, http://, https:// or ssh://".to_owned()),
        }
    }

    fn destination(&self, rest: &str) -> Result<Destination, String> {
        let (authority, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        let (login, port) = match authority.rsplit_once(':') {
            // The last colon of an address in brackets belongs to the address.
            Some((login, port)) if !port.ends_with(']') => {
                let port = port
                    .parse()
                    .map_err(|_| format!("must have a port from 0 to 65535, not `{port}`"))?;
                (login, Some(port))
            }
            Some(_) | None => (authority, None),
        };
        let plain = |part: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "._-:[]%".contains(c);
            !part.is_empty() && !part.starts_with('-') && part.chars().all(allowed)
        };
        let (user, host) = match login.split_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, login),
        };
        // `ssh` takes text that starts with a dash as an option, and a password is not supported.
        if !plain(host) || user.is_some_and(|user| !plain(user) || user.contains(':')) {
            return Err("must look like ssh://user@host, ssh://host:port or \
                        ssh://user@host/path/of/docker.sock"
                .to_owned());
        }
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let login = user.map_or_else(|| host.to_owned(), |user| format!("{user}@{host}"));
        let socket = if path.len() > 1 { path } else { USUAL_SOCKET };
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
    fn the_scheme_says_how_a_daemon_is_reached() {
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
    fn ssh_gets_a_login_a_port_and_a_socket_and_never_an_option() {
        let of = |url: &str| match host(url, None).transport() {
            Ok(Transport::Ssh(to)) => Ok((to.login, to.port, to.socket)),
            Ok(other) => panic!("{other:?}"),
            Err(words) => Err(words),
        };
        let usual = || USUAL_SOCKET.to_owned();
        assert_eq!(of("ssh://box"), Ok(("box".into(), None, usual())));
        assert_eq!(of("ssh://me@box:22/"), Ok(("me@box".into(), Some(22), usual())));
        assert_eq!(
            of("ssh://me@box/run/d.sock"),
            Ok(("me@box".into(), None, "/run/d.sock".into()))
        );
        assert_eq!(of("ssh://me@[::1]:2222"), Ok(("me@::1".into(), Some(2222), usual())));
        assert_eq!(of("ssh://[fe80::1]"), Ok(("fe80::1".into(), None, usual())));
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
