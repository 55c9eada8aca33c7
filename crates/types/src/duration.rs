//! Config values with units: `"90s"`, `"8 GiB"`. A bare number is refused, because its unit would
//! be a guess.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Text that is not a number with a known unit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a {kind} (write a number with its unit, like {example})")]
pub struct ParseUnitError {
    kind: &'static str,
    example: &'static str,
    text: String,
}

fn split_unit(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(at);
    Some((number.parse().ok()?, unit.trim()))
}

/// A duration written with a unit: `ms`, `s`, `m` or `h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HumanDuration(pub Duration);

impl HumanDuration {
    /// Whole seconds.
    pub const fn secs(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
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
        let error =
            || ParseUnitError { kind: "duration", example: "\"90s\"", text: text.to_owned() };
        let (number, unit) = split_unit(text).ok_or_else(error)?;
        let seconds = match unit {
            "ms" => number / 1000.0,
            "s" => number,
            "m" | "min" => number * 60.0,
            "h" => number * 3600.0,
            _ => return Err(error()),
        };
        Duration::try_from_secs_f64(seconds).map(Self).map_err(|_| error())
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

/// A size in bytes written with a unit: `B`, `KiB`, `MiB`, `GiB` or `TiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// Whole mebibytes.
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }
}

const BYTE_UNITS: [(&str, u32); 5] = [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];

impl FromStr for ByteSize {
    type Err = ParseUnitError;
    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let error = || ParseUnitError { kind: "size", example: "\"8 GiB\"", text: text.to_owned() };
        let at = text.trim().find(|c: char| !c.is_ascii_digit()).ok_or_else(error)?;
        let (number, unit) = text.trim().split_at(at);
        let number: u64 = number.parse().map_err(|_| error())?;
        let (_, shift) =
            BYTE_UNITS.iter().find(|(name, _)| *name == unit.trim()).ok_or_else(error)?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(error)
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

macro_rules! text_with_unit {
    ($type:ty, $name:literal, $pattern:literal, $example:literal) => {
        impl Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
            }
        }
        impl schemars::JsonSchema for $type {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                $name.into()
            }
            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({"type": "string", "pattern": $pattern, "examples": [$example]})
            }
        }
    };
}
text_with_unit!(HumanDuration, "Duration", r"^\d+(\.\d+)? ?(ms|s|m|min|h)$", "90s");
text_with_unit!(ByteSize, "ByteSize", r"^\d+ ?(B|KiB|MiB|GiB|TiB)$", "8 GiB");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_need_a_unit() {
        assert_eq!("90s".parse::<HumanDuration>().unwrap().0, Duration::from_secs(90));
        assert_eq!("1.5m".parse::<HumanDuration>().unwrap().0, Duration::from_secs(90));
        assert_eq!("250ms".parse::<HumanDuration>().unwrap().to_string(), "250ms");
        for bad in ["90", "", "s", "-1s", "1 day", "1e9999s"] {
            assert!(bad.parse::<HumanDuration>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_print_in_their_largest_whole_unit() {
        assert_eq!("8 GiB".parse::<ByteSize>().unwrap().0, 8 << 30);
        assert_eq!(ByteSize(3 << 20).to_string(), "3 MiB");
        assert_eq!(ByteSize(1000).to_string(), "1000 B");
        assert!("99999999999 GiB".parse::<ByteSize>().is_err());
        assert!("8".parse::<ByteSize>().is_err());
    }
}
