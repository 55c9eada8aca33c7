//! The section `[gateway]`: the server from which external workers take episodes.

use camino::Utf8PathBuf;
use orchestrate_settings::{Problems, at_least, satisfies, settings, variable_name};
use orchestrate_types::{ConfigProblem, HumanDuration};
use std::net::SocketAddr;

settings! {
    /// The server from which external workers take episodes, and through which their agents sample.
    /// Used with `rollout.scaffold = "external"`.
    #[derive(Eq)]
    [gateway] pub GatewaySection -> GatewaySettings, check: check_together;

    /// Address and port to listen on. Port 0 chooses a free port, which is printed.
    listen: String = "127.0.0.1:4170".to_owned(),
        satisfies(
            |text: &str| text.parse::<SocketAddr>().is_ok(),
            "an address and a port",
            "must be an IP address and a port, like \"127.0.0.1:4170\"",
        );
    /// Name of the environment variable that holds the bearer token of workers. Required on an
    /// address that other hosts can reach, unless `tls_client_ca` is set.
    secret_env: Option<String> = None => "no token required",
        variable_name("must be the name of an environment variable, not the token itself");
    /// PEM file with the server's certificate: serve HTTPS.
    tls_cert: Option<Utf8PathBuf> = None => "plain HTTP";
    /// PEM file with the private key of `tls_cert`.
    tls_key: Option<Utf8PathBuf> = None => "none";
    /// PEM file with authorities: only clients with a certificate of one of them are served (mutual
    /// TLS).
    tls_client_ca: Option<Utf8PathBuf> = None => "no client certificate required";
    /// Host names by which clients address the server. On a loopback address, or without a token,
    /// only localhost, IP addresses and these names are answered.
    allowed_hosts: Vec<String> = Vec::new();
    /// Maximum number of open connections. Each worker uses one or two, and its agent one for each
    /// concurrent request.
    max_connections: usize = 4096, at_least(1);
    /// Time without a heartbeat after which a worker is considered dead. Its attempt is broken, and
    /// retried within `rollout.max_attempts`.
    lease: HumanDuration = HumanDuration::secs(60), at_least(HumanDuration::secs(1));
    /// Time that a worker has after `rollout.episode_timeout` to return its reward.
    grace: HumanDuration = HumanDuration::secs(60);
}

fn check_together(_: &GatewaySection, settings: &GatewaySettings, problems: &mut Problems) {
    let (certificate, key) = (&settings.tls_cert, &settings.tls_key);
    problems.require(
        certificate.is_some() == key.is_some(),
        "tls_key",
        key.as_ref().map_or("none", |key| key.as_str()),
        "must be set together with tls_cert",
    );
    problems.require(
        settings.tls_client_ca.is_none() || certificate.is_some(),
        "tls_client_ca",
        settings.tls_client_ca.as_ref().map_or("none", |file| file.as_str()),
        "needs tls_cert and tls_key",
    );
    let is_secured = settings.secret_env.is_some() || settings.tls_client_ca.is_some();
    let is_open = settings.address().is_ok_and(|address| !address.ip().is_loopback());
    problems.require(
        is_secured || !is_open,
        "listen",
        &settings.listen,
        "is reachable from other hosts, which could take episodes and sample without a secret; \
         set gateway.secret_env or gateway.tls_client_ca",
    );
}

impl GatewaySettings {
    /// The address to listen on.
    ///
    /// # Errors
    /// If it is not an address and a port, which the section's check rules out.
    pub fn address(&self) -> Result<SocketAddr, ConfigProblem> {
        self.listen.parse().map_err(|_| {
            ConfigProblem::new("gateway.listen", &self.listen, "must be an address and a port")
        })
    }

    /// The workers' token from the environment; `None` if no variable is named.
    ///
    /// # Errors
    /// If the named variable is unset or empty.
    pub fn secret(&self) -> Result<Option<String>, ConfigProblem> {
        let Some(name) = &self.secret_env else { return Ok(None) };
        match std::env::var(name) {
            Ok(secret) if !secret.trim().is_empty() => Ok(Some(secret)),
            Ok(_) | Err(_) => Err(ConfigProblem::new(
                "gateway.secret_env",
                name,
                format!("the environment variable {name} must hold the workers' token"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_files_are_checked() {
        let settings = GatewaySection::default().check().unwrap();
        assert_eq!(settings.address().unwrap().port(), 4170);
        let wrong = GatewaySection {
            listen: Some("localhost".to_owned()),
            tls_cert: Some("a.pem".into()),
            ..GatewaySection::default()
        };
        let problems = wrong.check().unwrap_err();
        let keys: Vec<&str> = problems.iter().map(|problem| problem.key.as_str()).collect();
        assert_eq!(keys, ["gateway.listen", "gateway.tls_key"]);
        // An address that other hosts reach needs a secret.
        let open = GatewaySection { listen: Some("0.0.0.0:1".to_owned()), ..Default::default() };
        let problem = open.check().unwrap_err().remove(0);
        assert!(problem.to_string().contains("gateway.secret_env"), "{problem}");
        let secret = GatewaySection { secret_env: Some("S".to_owned()), ..open };
        secret.check().unwrap();
    }
}
