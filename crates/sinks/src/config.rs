//! The section `[sinks]`: copies of the metrics for other programs.

use orchestrate_settings::{Problems, at_least, satisfies, settings, variable_name};
use orchestrate_types::{ConfigProblem, HumanDuration};
use std::net::SocketAddr;

settings! {
    /// Copies of the metrics for other programs. `metrics.jsonl` is always written.
    #[derive(Eq)]
    [sinks] pub SinksSection -> SinksSettings, check: check_together;

    /// Address and port of an HTTP server with the path `/metrics`, which Prometheus scrapes while the
    /// run is going on. Port 0 chooses a free port, which is printed.
    prometheus: Option<String> = None => "no server",
        satisfies(
            |text: &str| text.parse::<SocketAddr>().is_ok(),
            "an address and a port",
            "must be an IP address and a port, like \"127.0.0.1:9180\"",
        );
    /// Name of the environment variable that holds the bearer token for `/metrics`. Required on an
    /// address that other hosts can reach.
    prometheus_token_env: Option<String> = None => "no token required",
        variable_name("must be the name of an environment variable, not the token itself");
    /// Write TensorBoard event files to the folder `tensorboard` of the run folder.
    tensorboard: bool = false;
    /// Write `metrics.csv` to the run folder.
    csv: bool = false;
    /// Write `metrics.parquet` to the run folder.
    parquet: bool = false;
    /// Time that the sinks have at the end of the run to write what is missing. A Prometheus server
    /// that has scraped before gets it for a last scrape.
    flush_timeout: HumanDuration = HumanDuration::secs(60), at_least(HumanDuration::secs(1));
}

fn check_together(written: &SinksSection, settings: &SinksSettings, problems: &mut Problems) {
    let (address, token) = (&settings.prometheus, &settings.prometheus_token_env);
    problems.require(
        token.is_none() || address.is_some(),
        "prometheus_token_env",
        token.as_deref().unwrap_or("none"),
        "needs sinks.prometheus, the address of the server",
    );
    if address.is_none() && !settings.has_files() {
        problems.refuse_unread(written, &["flush_timeout"], "only applies with a sink");
    }
    let is_open = settings.prometheus_address().is_some_and(|address| !address.ip().is_loopback());
    problems.require(
        token.is_some() || !is_open,
        "prometheus",
        address.as_deref().unwrap_or("none"),
        "is reachable from other hosts, which could read the run's metrics without a token; set \
         sinks.prometheus_token_env",
    );
}

impl SinksSettings {
    /// Whether a sink writes files, which may lack lines of an ended run.
    pub fn has_files(&self) -> bool {
        self.tensorboard || self.csv || self.parquet
    }

    /// The address of the server that Prometheus scrapes, if there is one.
    pub fn prometheus_address(&self) -> Option<SocketAddr> {
        self.prometheus.as_ref()?.parse().ok()
    }

    /// The token for `/metrics` from the environment; `None` if no variable is named.
    ///
    /// # Errors
    /// If the named variable is unset or empty.
    pub fn prometheus_token(&self) -> Result<Option<String>, ConfigProblem> {
        let Some(name) = &self.prometheus_token_env else { return Ok(None) };
        match std::env::var(name) {
            Ok(token) if !token.trim().is_empty() => Ok(Some(token)),
            Ok(_) | Err(_) => Err(ConfigProblem::new(
                "sinks.prometheus_token_env",
                name,
                format!("the environment variable {name} must hold the token for /metrics"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_addresses_need_a_token() {
        let at = |address: &str, token: Option<&str>| SinksSection {
            prometheus: Some(address.to_owned()),
            prometheus_token_env: token.map(str::to_owned),
            ..SinksSection::default()
        };
        assert!(at("127.0.0.1:0", None).check().is_ok());
        assert!(at("0.0.0.0:9180", Some("TOKEN")).check().is_ok());
        for (section, key) in [
            (at("0.0.0.0:9180", None), "sinks.prometheus"),
            (at("localhost", None), "sinks.prometheus"),
            (
                SinksSection { prometheus_token_env: Some("T".to_owned()), ..Default::default() },
                "sinks.prometheus_token_env",
            ),
        ] {
            let problems = section.check().unwrap_err();
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert_eq!(problems[0].key, key);
        }
        let late = |csv| SinksSection {
            csv: Some(csv),
            flush_timeout: Some(HumanDuration::secs(5)),
            ..SinksSection::default()
        };
        late(true).check().unwrap();
        assert_eq!(late(false).check().unwrap_err()[0].key, "sinks.flush_timeout");
        let missing = at("127.0.0.1:0", Some("ORCHESTRATE_NO_SUCH_TOKEN")).check().unwrap();
        assert!(missing.prometheus_token().unwrap_err().to_string().contains("NO_SUCH_TOKEN"));
    }
}
