//! Events of `tensorboard` in protobuf's wire format. Only these fields are written:
//!
//! ```text
//! Event   { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }
//! Summary { repeated Value value = 1; }
//! Value   { string tag = 1; float simple_value = 2; }
//! ```

use crate::line::Line;

/// First event of every file.
pub(super) fn encoded_version() -> &'static [u8] {
    // Field 3, 13 bytes.
    b"\x1a\x0dbrain.Event:2"
}

/// A line as an event: the time, the step and all numbers.
pub(super) fn encoded_line(line: &Line) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, number) in line.numbers() {
        let mut value = Vec::new();
        put_bytes(&mut value, 1, tag.as_bytes());
        value.push(key(2, FIXED_32));
        value.extend(to_f32(number).to_le_bytes());
        put_bytes(&mut summary, 1, &value);
    }
    let mut event = vec![key(1, FIXED_64)];
    event.extend(line.unix_seconds().to_le_bytes());
    event.push(key(2, VARINT));
    put_varint(&mut event, u64::from(line.step()));
    put_bytes(&mut event, 5, &summary);
    event
}

const VARINT: u8 = 0;
const FIXED_64: u8 = 1;
const LENGTH: u8 = 2;
const FIXED_32: u8 = 5;

/// The byte before a field with a number below 16.
const fn key(field: u8, wire_type: u8) -> u8 {
    field << 3 | wire_type
}

fn put_varint(bytes: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        bytes.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    bytes.push((number & 0x7f) as u8);
}

fn put_bytes(bytes: &mut Vec<u8>, field: u8, content: &[u8]) {
    bytes.push(key(field, LENGTH));
    put_varint(bytes, content.len() as u64);
    bytes.extend(content);
}

#[expect(clippy::cast_possible_truncation, reason = "scalars are 32-bit floats")]
fn to_f32(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_any_size_are_varints() {
        for (number, expected) in [(0, &[0][..]), (127, &[127]), (300, &[0xac, 2])] {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, number);
            assert_eq!(bytes, expected);
        }
    }
}
