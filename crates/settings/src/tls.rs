//! PEM files of a TLS client, as several sections name them.

use crate::Problems;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_types::ConfigProblem;

/// PEM files with which a client connects to an `https` server: the keys `tls_ca`, `tls_cert` and
/// `tls_key` of a section.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsClientFiles {
    /// Authorities whose servers are trusted, instead of the system's.
    pub ca: Option<Utf8PathBuf>,
    /// The client's certificate.
    pub certificate: Option<Utf8PathBuf>,
    /// Private key of the certificate.
    pub key: Option<Utf8PathBuf>,
}

/// The content of [`TlsClientFiles`].
#[derive(Clone, Default, PartialEq, Eq)]
pub struct TlsClientPem {
    /// Certificates of the trusted authorities; `None` trusts those of the system.
    pub ca: Option<Vec<u8>>,
    /// The client's private key and certificates; `None` sends none.
    pub identity: Option<Vec<u8>>,
}

impl TlsClientFiles {
    /// Records the problems in the keys of a section whose servers have these URLs.
    pub fn check<'a>(&self, urls: impl IntoIterator<Item = &'a str>, problems: &mut Problems) {
        match (&self.certificate, &self.key) {
            (Some(_), None) => problems.missing("tls_key", "must be the key of tls_cert"),
            (None, Some(_)) => problems.missing("tls_cert", "must be the certificate of tls_key"),
            (Some(_), Some(_)) | (None, None) => {}
        }
        let plain = urls.into_iter().find(|url| !url.starts_with("https://"));
        let named = [("tls_ca", &self.ca), ("tls_cert", &self.certificate)];
        if let (Some(url), Some((key, Some(path)))) =
            (plain, named.into_iter().find(|(_, path)| path.is_some()))
        {
            let remedy = format!("requires an https URL, but the server is {url}");
            problems.refuse(key, path, remedy);
        }
    }

    /// Reads the files. Blocking. `section` is the section's name, e.g. `engine`.
    ///
    /// # Errors
    /// If a file cannot be read, with its key.
    pub fn read(&self, section: &str) -> Result<TlsClientPem, ConfigProblem> {
        let read = |key: &str, path: &Utf8Path| {
            std::fs::read(path).map_err(|error| {
                let remedy = format!("must be a readable PEM file ({error})");
                ConfigProblem::new(format!("{section}.{key}"), path, remedy)
            })
        };
        let ca = self.ca.as_deref().map(|path| read("tls_ca", path)).transpose()?;
        let identity = match (&self.key, &self.certificate) {
            (Some(key), Some(certificate)) => {
                let mut pem = read("tls_key", key)?;
                pem.push(b'\n');
                pem.extend(read("tls_cert", certificate)?);
                Some(pem)
            }
            (Some(_), None) | (None, Some(_) | None) => None,
        };
        Ok(TlsClientPem { ca, identity })
    }
}

#[cfg(feature = "http")]
impl TlsClientPem {
    /// Has an HTTP client trust the given authorities only, and show the given certificate.
    ///
    /// # Errors
    /// If the content is not valid PEM.
    pub fn configure(
        &self,
        mut client: reqwest::ClientBuilder,
    ) -> reqwest::Result<reqwest::ClientBuilder> {
        if let Some(ca) = &self.ca {
            client = client.tls_certs_only(reqwest::Certificate::from_pem_bundle(ca)?);
        }
        if let Some(identity) = &self.identity {
            client = client.identity(reqwest::Identity::from_pem(identity)?);
        }
        Ok(client)
    }
}

impl std::fmt::Debug for TlsClientPem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsClientPem")
            .field("ca", &self.ca.is_some())
            .field("identity", &self.identity.as_ref().map(|_| "(not shown)"))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_and_key_belong_together_and_need_https() {
        let keys = |files: TlsClientFiles, url: &str| {
            let mut problems = Problems::new("engine");
            files.check([url], &mut problems);
            problems.into_found().into_iter().map(|p| p.key).collect::<Vec<_>>()
        };
        let whole = TlsClientFiles {
            ca: Some("ca.pem".into()),
            certificate: Some("cert.pem".into()),
            key: Some("key.pem".into()),
        };
        assert!(keys(whole.clone(), "https://a:1").is_empty());
        assert_eq!(keys(whole.clone(), "http://a:1"), ["engine.tls_ca"]);
        let no_key = TlsClientFiles { key: None, ..whole.clone() };
        assert_eq!(keys(no_key, "https://a:1"), ["engine.tls_key"]);
        let no_certificate = TlsClientFiles { certificate: None, ..whole };
        assert_eq!(keys(no_certificate, "https://a:1"), ["engine.tls_cert"]);
        assert!(keys(TlsClientFiles::default(), "http://a:1").is_empty());
    }

    #[test]
    fn a_missing_file_is_a_problem_of_its_key_and_keys_are_not_shown() {
        let files = TlsClientFiles { ca: Some("/no/ca.pem".into()), ..Default::default() };
        let problem = files.read("trainer").unwrap_err();
        assert_eq!(problem.key, "trainer.tls_ca");
        let pem = TlsClientPem { ca: None, identity: Some(b"canary".to_vec()) };
        assert!(!format!("{pem:?}").contains("canary"));
    }
}
