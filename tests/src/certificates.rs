//! Certificates created by a test, for a daemon and its clients on loopback.

use std::path::Path;
use std::process::{Command, Stdio};

const KEY: [&str; 5] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];

/// Makes `ca.pem`, a client's `cert.pem` and `key.pem`, and a server's `server-cert.pem` and
/// `server-key.pem` in a folder. Returns false if `openssl` is not installed.
///
/// # Errors
/// Fails if the folder cannot be written.
pub fn make(folder: &Path) -> anyhow::Result<bool> {
    let server = "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth\n";
    std::fs::write(folder.join("server.ext"), server)?;
    std::fs::write(folder.join("client.ext"), "extendedKeyUsage=clientAuth\n")?;
    let openssl = |line: &[&str], key: &[&str]| {
        let mut command = Command::new("openssl");
        command.current_dir(folder).stderr(Stdio::null()).args(line).args(key);
        command.status().is_ok_and(|status| status.success())
    };
    let root = ["req", "-x509", "-days", "2", "-subj", "/CN=authority"];
    if !openssl(&[&root[..], &["-keyout", "ca-key.pem", "-out", "ca.pem"]].concat(), &KEY) {
        return Ok(false);
    }
    for (name, key, certificate) in
        [("server", "server-key.pem", "server-cert.pem"), ("client", "key.pem", "cert.pem")]
    {
        let subject = format!("/CN={name}");
        let (request, extensions) = (format!("{name}.csr"), format!("{name}.ext"));
        let asked = ["req", "-subj", &subject, "-keyout", key, "-out", &request];
        let authority = ["-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial", "-days", "2"];
        let signed =
            ["x509", "-req", "-in", &request, "-extfile", &extensions, "-out", certificate];
        if !openssl(&asked, &KEY) || !openssl(&signed, &authority) {
            return Ok(false);
        }
    }
    Ok(true)
}
