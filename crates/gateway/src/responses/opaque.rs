//! The `encrypted_content` of reasoning items: the thinking itself, for clients that send back this
//! field alone. It is not encrypted: the client has the text anyway.

use base64_simd::STANDARD;

/// Tells our content from that of other servers.
const PREFIX: &str = "orchestrate.";

/// The field for a text.
pub(crate) fn encoded(text: &str) -> String {
    format!("{PREFIX}{}", STANDARD.encode_to_string(text))
}

/// The text of a field that [`encoded`] made.
pub(super) fn decoded(field: &str) -> Option<String> {
    let bytes = STANDARD.decode_to_vec(field.strip_prefix(PREFIX)?).ok()?;
    String::from_utf8(bytes).ok()
}
