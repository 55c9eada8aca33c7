//! Secrets of episodes and leases, and their digests.

use serde::{Deserialize, Serialize};
use std::fmt::{self, Write as _};

/// Random bytes of a secret.
const SECRET_BYTES: usize = 24;

/// Generates a secret, in hexadecimal.
pub(crate) fn secret() -> String {
    let mut secret = String::with_capacity(2 * SECRET_BYTES);
    for byte in rand::random::<[u8; SECRET_BYTES]>() {
        // Writing to a string does not fail.
        let _ = write!(secret, "{byte:02x}");
    }
    secret
}

/// Digest of a secret: recognises the secret, and can be written to a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct SecretDigest([u8; 32]);

impl fmt::Debug for SecretDigest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("SecretDigest").finish_non_exhaustive()
    }
}

impl SecretDigest {
    pub(crate) fn of(secret: &[u8]) -> Self {
        Self(*blake3::hash(secret).as_bytes())
    }
}
