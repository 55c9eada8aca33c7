//! `--variant` of `orchestrate compare`.

use std::str::FromStr;

/// A configuration of a comparison: a name, and the settings that differ from the config file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) name: String,
    /// `KEY=VALUE`, as `--set` takes them.
    pub(crate) sets: Vec<String>,
}

/// The text of a `--variant` does not start with a name that can be a folder's.
#[derive(Debug, thiserror::Error)]
#[error("variant {0:?}: expected NAME:KEY=VALUE,… with a name of letters, digits, . _ + -")]
pub(crate) struct InvalidVariant(String);

impl FromStr for Variant {
    type Err = InvalidVariant;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, sets) = text.split_once(':').unwrap_or((text, ""));
        let usable = |c: char| c.is_ascii_alphanumeric() || "._+-".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(usable) {
            return Err(InvalidVariant(name.to_owned()));
        }
        Ok(Self { name: name.to_owned(), sets: at_commas(sets) })
    }
}

/// Splits at commas that are not part of a value.
fn at_commas(text: &str) -> Vec<String> {
    let (mut depth, mut quote, mut parts) = (0u32, None, vec![String::new()]);
    for c in text.chars() {
        match quote {
            Some(open) if open == c => quote = None,
            None if matches!(c, '"' | '\'') => quote = Some(c),
            None if matches!(c, '[' | '{') => depth += 1,
            None if matches!(c, ']' | '}') => depth = depth.saturating_sub(1),
            None if c == ',' && depth == 0 => {
                parts.push(String::new());
                continue;
            }
            Some(_) | None => {}
        }
        if let Some(part) = parts.last_mut() {
            part.push(c);
        }
    }
    let trimmed = parts.iter().map(|part| part.trim().to_owned());
    trimmed.filter(|part| !part.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variant_splits_at_commas_outside_values() {
        let variant: Variant =
            "gspo+r3: a.b=gspo, a.betas=[0.9, 0.95],c.d=\"x,y\" ,e.f={ g = 1, h = 2 }"
                .parse()
                .unwrap();
        assert_eq!(variant.name, "gspo+r3");
        let sets = ["a.b=gspo", "a.betas=[0.9, 0.95]", "c.d=\"x,y\"", "e.f={ g = 1, h = 2 }"];
        assert_eq!(variant.sets, sets);
        assert_eq!("as-it-is".parse::<Variant>().unwrap().sets, [] as [String; 0]);
        for bad in [":a.b=1", "a/b:c.d=1", "..", ""] {
            assert!(bad.parse::<Variant>().is_err(), "{bad}");
        }
    }
}
