//! The fields that clients send back with a reply's thinking without reading them: `signature` of thinking
//! blocks, and `encrypted_content` of reasoning items. They name the reply, so that it is recognised. The
//! second also has the thinking itself, for clients that send back this field alone; it is not encrypted,
//! because the client has the text anyway.

use base64_simd::STANDARD;

/// Tells our fields from those of other servers.
const PREFIX: &str = "orchestrate.";

/// The signature of the thinking of a reply, by the reply's number.
pub(crate) fn signature(reply: u32) -> String {
    STANDARD.encode_to_string(format!("{PREFIX}{reply}"))
}

/// The number of the reply that a [`signature`] names.
pub(crate) fn signed(signature: &str) -> Option<u32> {
    let bytes = STANDARD.decode_to_vec(signature).ok()?;
    std::str::from_utf8(&bytes).ok()?.strip_prefix(PREFIX)?.parse().ok()
}

/// The encrypted content for the thinking of a reply, by the reply's number.
pub(crate) fn encoded(reply: u32, text: &str) -> String {
    format!("{PREFIX}{reply}.{}", STANDARD.encode_to_string(text))
}

/// The number and the text of a field that [`encoded`] made.
pub(crate) fn decoded(field: &str) -> Option<(u32, String)> {
    let (reply, text) = field.strip_prefix(PREFIX)?.split_once('.')?;
    let text = String::from_utf8(STANDARD.decode_to_vec(text).ok()?).ok()?;
    Some((reply.parse().ok()?, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_here_is_read_and_nothing_else() {
        for number in [0, 7, u32::MAX] {
            assert_eq!(signed(&signature(number)), Some(number));
            let text = "hm\n é.";
            assert_eq!(decoded(&encoded(number, text)), Some((number, text.to_owned())));
        }
        for field in ["", "s", "EqQBCgIYAhIM", "orchestrate.7", "b3JjaGVzdHJhdGU=", "gAAAA-foreign"]
        {
            assert_eq!(signed(field), None, "{field}");
            assert_eq!(decoded(field), None, "{field}");
        }
    }
}
