//! The sections `[handoff]` and `[trainer]`.

use camino::Utf8PathBuf;
use orchestrate_settings::{Problems, TlsClientFiles, above, satisfies, settings, variable_name};
use orchestrate_types::{ConfigProblem, HumanDuration};

settings! {
    /// Format of the batches.
    #[derive(Copy, Eq)]
    [handoff] pub HandoffSection -> HandoffSettings;

    /// Write routing rows that several members of a group share only once, with the number of its row
    /// for each token. This saves space if prompts are long; readers then see the rows of a sequence
    /// in two parts.
    share_prefix_rows: bool = false;
}

settings! {
    /// Address of the trainer.
    #[derive(Eq)]
    [trainer] pub TrainerSection -> TrainerSettings, check: check_together;

    /// Base URL of a trainer, e.g. `http://127.0.0.1:7070`.
    url: Option<String> = None => "the embedded trainer",
        satisfies(
            is_http_url,
            "an HTTP URL",
            "must be a URL like \"http://127.0.0.1:7070\"; leave it out for the embedded trainer",
        );
    /// Name of the environment variable that holds the trainer's bearer token.
    token_env: Option<String> = None => "no token is sent",
        variable_name("must be the name of an environment variable, not the token itself");
    /// PEM file with the authorities whose certificates are accepted from an `https` trainer, instead of the
    /// system's.
    tls_ca: Option<Utf8PathBuf> = None => "the system's authorities";
    /// PEM file with the certificate that is shown to a trainer that asks for one (mutual TLS).
    tls_cert: Option<Utf8PathBuf> = None => "no certificate is shown";
    /// PEM file with the private key of `tls_cert`.
    tls_key: Option<Utf8PathBuf> = None => "none";
    /// Maximum time for one step, including recompute and checkpoint.
    step_timeout: HumanDuration = HumanDuration::secs(2 * 3600), above(HumanDuration::secs(0));
}

fn is_http_url(url: &str) -> bool {
    reqwest::Url::parse(url)
        .is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

fn check_together(written: &TrainerSection, settings: &TrainerSettings, problems: &mut Problems) {
    settings.tls().check(settings.url.as_deref(), problems);
    if settings.url.is_none() {
        let keys = ["token_env", "tls_ca", "tls_cert", "tls_key"];
        problems.refuse_unread(written, &keys, "only applies with trainer.url");
    }
}

impl TrainerSettings {
    /// The files of `tls_ca`, `tls_cert` and `tls_key`.
    pub fn tls(&self) -> TlsClientFiles {
        let Self { tls_ca: ca, tls_cert: certificate, tls_key: key, .. } = self.clone();
        TlsClientFiles { ca, certificate, key }
    }

    /// The bearer token from the environment; `None` if no variable is named.
    ///
    /// # Errors
    /// If the named variable is not set, or empty.
    pub fn token(&self) -> Result<Option<String>, ConfigProblem> {
        let Some(name) = &self.token_env else { return Ok(None) };
        match std::env::var(name) {
            Ok(token) if !token.is_empty() => Ok(Some(token)),
            Ok(_) | Err(_) => Err(ConfigProblem::new(
                "trainer.token_env",
                name,
                format!("the environment variable {name} must hold the trainer's token"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_without_an_address_are_refused_by_name() {
        let section = TrainerSection {
            token_env: Some("KEY".to_owned()),
            tls_ca: Some("a".to_owned()),
            tls_cert: Some("b".to_owned()),
            tls_key: Some("c".to_owned()),
            ..TrainerSection::default()
        };
        let problems = section.check().unwrap_err();
        assert!(problems.iter().all(|p| p.remedy.starts_with("only applies with trainer.url")));
        let keys: Vec<&str> = problems.iter().map(|problem| problem.key.as_str()).collect();
        assert_eq!(
            keys,
            ["token_env", "tls_ca", "tls_cert", "tls_key"].map(|key| format!("trainer.{key}"))
        );
        TrainerSection { url: Some("https://a:1".to_owned()), ..section }.check().unwrap();
    }
}
