//! Durations and sizes as people write them: `"90s"`, `"1h30m"`, `90`; `"4 GiB"`, `"4GB"`, `4096`.

use jiff::SignedDuration;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Text that is not a number with a known unit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}`: must be {expected}")]
pub struct ParseUnitError {
    expected: &'static str,
    text: String,
}

/// A duration of 0 up to ten years, so that it can be added to any time.
///
/// Read from text in the units `ms`, `s`, `m` and `h`, alone or combined (`"1h30m"`), or from a
/// plain number of seconds. Printed in seconds if they are whole, otherwise in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HumanDuration(pub Duration);

impl ParseUnitError {
    /// What the text must be.
    pub fn expected(&self) -> &'static str {
        self.expected
    }
}

impl HumanDuration {
    /// What a configured duration must look like.
    pub const EXPECTED: &'static str =
        "a duration like \"90s\", \"1h30m\" or \"250ms\", or a number of seconds";

    /// The longest duration that is read.
    pub const LONGEST: Self = Self::secs(10 * 365 * 24 * 3600);

    /// A number of whole seconds.
    pub const fn secs(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    /// A number of milliseconds.
    pub const fn millis(millis: u64) -> Self {
        Self(Duration::from_millis(millis))
    }

    fn error(text: &dyn fmt::Display) -> ParseUnitError {
        ParseUnitError { expected: Self::EXPECTED, text: text.to_string() }
    }

    /// A number of seconds.
    ///
    /// # Errors
    /// If it is negative, not finite, or more than [`HumanDuration::LONGEST`].
    pub fn from_seconds(seconds: f64) -> Result<Self, ParseUnitError> {
        let time = Duration::try_from_secs_f64(seconds).map_err(|_| Self::error(&seconds))?;
        Self::bounded(time)
    }

    fn bounded(time: Duration) -> Result<Self, ParseUnitError> {
        let time = Self(time);
        if time <= Self::LONGEST {
            return Ok(time);
        }
        Err(ParseUnitError { expected: "at most ten years", text: time.to_string() })
    }
}

impl From<HumanDuration> for Duration {
    fn from(value: HumanDuration) -> Self {
        value.0
    }
}

impl FromStr for HumanDuration {
    type Err = ParseUnitError;
    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let signed: SignedDuration = text.trim().parse().map_err(|_| Self::error(&text))?;
        Self::bounded(Duration::try_from(signed).map_err(|_| Self::error(&text))?)
    }
}

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_millis();
        if millis.is_multiple_of(1000) {
            write!(f, "{}s", millis / 1000)
        } else {
            write!(f, "{millis}ms")
        }
    }
}

/// A size in bytes.
///
/// Read from text with a decimal (`kB`, `MB`, `GB`, `TB`) or binary unit (`KiB`, `MiB`, `GiB`,
/// `TiB`), with or without a space before it, or from a plain number of bytes. Printed in the
/// largest binary unit that divides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// What a configured size must look like.
    pub const EXPECTED: &'static str =
        "a size like \"4 GiB\", \"512MiB\" or \"4GB\", or a number of bytes";

    /// A number of whole mebibytes.
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    fn error(text: &dyn fmt::Display) -> ParseUnitError {
        ParseUnitError { expected: Self::EXPECTED, text: text.to_string() }
    }
}

const BYTE_UNITS: [(&str, u32); 5] = [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];

impl FromStr for ByteSize {
    type Err = ParseUnitError;
    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let size: bytesize::ByteSize = text.parse().map_err(|_| Self::error(&text))?;
        // The crate `bytesize` computes in floating point, and an overflow gives the largest number.
        if size.as_u64() == u64::MAX { Err(Self::error(&text)) } else { Ok(Self(size.as_u64())) }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = BYTE_UNITS
            .iter()
            .rev()
            .find(|(_, shift)| self.0 != 0 && self.0.is_multiple_of(1 << shift));
        match unit {
            Some((name, shift)) => write!(f, "{} {name}", self.0 >> shift),
            None => write!(f, "{} B", self.0),
        }
    }
}

struct DurationVisitor;

impl Visitor<'_> for DurationVisitor {
    type Value = HumanDuration;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HumanDuration::EXPECTED)
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<HumanDuration, E> {
        text.parse().map_err(E::custom)
    }
    fn visit_u64<E: de::Error>(self, seconds: u64) -> Result<HumanDuration, E> {
        HumanDuration::bounded(Duration::from_secs(seconds)).map_err(E::custom)
    }
    fn visit_i64<E: de::Error>(self, seconds: i64) -> Result<HumanDuration, E> {
        let seconds = u64::try_from(seconds).map_err(|_| E::custom("must not be negative"))?;
        self.visit_u64(seconds)
    }
    fn visit_f64<E: de::Error>(self, seconds: f64) -> Result<HumanDuration, E> {
        HumanDuration::from_seconds(seconds).map_err(E::custom)
    }
}

struct SizeVisitor;

impl Visitor<'_> for SizeVisitor {
    type Value = ByteSize;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(ByteSize::EXPECTED)
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
        text.parse().map_err(E::custom)
    }
    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
        Ok(ByteSize(bytes))
    }
    fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
        u64::try_from(bytes).map(ByteSize).map_err(|_| E::custom("must not be negative"))
    }
}

macro_rules! text_or_number {
    ($type:ty, $visitor:expr, $name:literal, $format:literal, $number:literal, $examples:tt) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any($visitor)
            }
        }
        impl schemars::JsonSchema for $type {
            fn schema_name() -> Cow<'static, str> {
                $name.into()
            }
            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({
                    "description": format!("{}{}", "Must be ", <$type>::EXPECTED),
                    "type": ["string", $number],
                    "format": $format,
                    "minimum": 0,
                    "examples": $examples,
                })
            }
        }
    };
}
text_or_number!(HumanDuration, DurationVisitor, "Duration", "duration", "number", ["90s", "1h30m"]);
text_or_number!(ByteSize, SizeVisitor, "ByteSize", "byte-size", "integer", ["8 GiB", "512MiB"]);

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::value::{
        Error, F64Deserializer, I64Deserializer, StrDeserializer, U64Deserializer,
    };

    fn text<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, Error> {
        T::deserialize(StrDeserializer::new(text))
    }

    #[test]
    fn durations_are_read_with_units_or_as_seconds() {
        for (written, millis) in [
            ("90s", 90_000),
            ("1.5m", 90_000),
            ("90 s", 90_000),
            ("10min", 600_000),
            ("1h30m", 5_400_000),
            ("720h", 2_592_000_000),
            ("250ms", 250),
            ("0s", 0),
        ] {
            assert_eq!(text(written), Ok(HumanDuration::millis(millis)), "{written}");
        }
        let seconds = HumanDuration::deserialize(I64Deserializer::<Error>::new(90));
        assert_eq!(seconds, Ok(HumanDuration::secs(90)));
        let seconds = HumanDuration::deserialize(F64Deserializer::<Error>::new(1.5));
        assert_eq!(seconds, Ok(HumanDuration::millis(1500)));
        for bad in ["90", "", "s", "-1s", "1 day", "1e9999s", "soon"] {
            let error = text::<HumanDuration>(bad).unwrap_err().to_string();
            assert!(error.contains("must be a duration like"), "{bad}: {error}");
        }
        assert!(HumanDuration::deserialize(I64Deserializer::<Error>::new(-1)).is_err());
        assert!(HumanDuration::deserialize(F64Deserializer::<Error>::new(f64::NAN)).is_err());
    }

    #[test]
    fn durations_are_bounded() {
        for text in ["90000h", "9223372036854775807s"] {
            let error = text.parse::<HumanDuration>().unwrap_err();
            assert_eq!(error.expected(), "at most ten years", "{text}");
        }
        for seconds in [u64::MAX, i64::MAX.unsigned_abs(), 400_000_000] {
            let read = HumanDuration::deserialize(U64Deserializer::<Error>::new(seconds));
            assert!(read.is_err(), "{seconds}");
        }
        assert!(HumanDuration::from_seconds(1e18).is_err());
        assert_eq!("87600h".parse::<HumanDuration>(), Ok(HumanDuration::LONGEST));
    }

    #[test]
    fn durations_print_in_seconds_or_milliseconds() {
        for printed in ["90s", "250ms", "1500ms", "5400s"] {
            assert_eq!(printed.parse::<HumanDuration>().unwrap().to_string(), printed);
        }
    }

    #[test]
    fn sizes_are_read_in_decimal_and_binary_units_or_as_bytes() {
        for (written, bytes) in [
            ("8 GiB", 8 << 30),
            ("8GiB", 8 << 30),
            ("512MiB", 512 << 20),
            ("4GB", 4_000_000_000),
            ("4 GB", 4_000_000_000),
            ("1 TiB", 1 << 40),
            ("1.5 GiB", 3 << 29),
            ("64 KiB", 64 << 10),
            ("1000 B", 1000),
            ("0 B", 0),
            ("4096", 4096),
        ] {
            assert_eq!(text(written), Ok(ByteSize(bytes)), "{written}");
        }
        let bytes = ByteSize::deserialize(I64Deserializer::<Error>::new(4096));
        assert_eq!(bytes, Ok(ByteSize(4096)));
        for bad in ["99999999999 GiB", "", "GiB", "-1 GiB", "8 Gb8", "many"] {
            let error = text::<ByteSize>(bad).unwrap_err().to_string();
            assert!(error.contains("must be a size like"), "{bad}: {error}");
        }
        assert!(ByteSize::deserialize(I64Deserializer::<Error>::new(-1)).is_err());
    }

    #[test]
    fn sizes_print_in_their_largest_whole_unit() {
        for printed in ["8 GiB", "3 MiB", "1000 B", "0 B"] {
            assert_eq!(printed.parse::<ByteSize>().unwrap().to_string(), printed);
        }
    }
}
