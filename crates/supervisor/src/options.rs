//! The supervisor's command line.

use std::error::Error;
use std::fmt;
use std::num::ParseIntError;
use std::time::Duration;

/// The supervisor's settings, passed as command-line arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Working directory of every command. Files are written and read below it.
    pub workdir: String,
    /// Process 1, and with it the container, ends after this time.
    pub lifetime: Duration,
    /// Whether resets are allowed, which requires a read-only root.
    pub reusable: bool,
}

/// Why the command line is invalid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OptionsError {
    /// An argument that the supervisor does not know.
    UnknownArgument(String),
    /// A required argument is missing.
    MissingArgument(&'static str),
    /// `--lifetime-ms` is not a whole number of milliseconds.
    InvalidLifetime {
        /// The value as written.
        value: String,
        /// Why it could not be parsed.
        source: ParseIntError,
    },
}

impl fmt::Display for OptionsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownArgument(argument) => write!(f, "unknown argument `{argument}`"),
            Self::MissingArgument(name) => write!(f, "missing argument {name}"),
            Self::InvalidLifetime { value, source } => {
                write!(f, "--lifetime-ms={value}: {source}")
            }
        }
    }
}

impl Error for OptionsError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::UnknownArgument(_) | Self::MissingArgument(_) => None,
            Self::InvalidLifetime { source, .. } => Some(source),
        }
    }
}

impl Options {
    /// The arguments from which [`Options::parse`] restores these options.
    pub fn to_args(&self) -> Vec<String> {
        let mut args = vec![
            format!("--workdir={}", self.workdir),
            format!("--lifetime-ms={}", self.lifetime.as_millis()),
        ];
        if self.reusable {
            args.push("--reusable".to_owned());
        }
        args
    }

    /// Parses the arguments, without the program name.
    ///
    /// # Errors
    /// [`OptionsError`] for the first unknown, missing or invalid argument.
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Self, OptionsError> {
        let (mut workdir, mut lifetime, mut reusable) = (None, None, false);
        for arg in args {
            if let Some(value) = arg.strip_prefix("--workdir=") {
                workdir = Some(value.to_owned());
            } else if let Some(value) = arg.strip_prefix("--lifetime-ms=") {
                let millis = value.parse().map_err(|source| OptionsError::InvalidLifetime {
                    value: value.to_owned(),
                    source,
                })?;
                lifetime = Some(Duration::from_millis(millis));
            } else if arg == "--reusable" {
                reusable = true;
            } else {
                return Err(OptionsError::UnknownArgument(arg));
            }
        }
        Ok(Self {
            workdir: workdir.ok_or(OptionsError::MissingArgument("--workdir"))?,
            lifetime: lifetime.ok_or(OptionsError::MissingArgument("--lifetime-ms"))?,
            reusable,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Options, OptionsError> {
        Options::parse(args.iter().map(ToString::to_string))
    }

    #[test]
    fn parse_restores_the_options_that_were_written() {
        let options = Options {
            workdir: "/work space".to_owned(),
            lifetime: Duration::from_secs(90),
            reusable: true,
        };
        assert_eq!(Options::parse(options.to_args().into_iter()), Ok(options));
    }

    #[test]
    fn parse_names_the_invalid_or_missing_argument() {
        assert_eq!(parse(&["--x"]), Err(OptionsError::UnknownArgument("--x".to_owned())));
        assert_eq!(parse(&[]), Err(OptionsError::MissingArgument("--workdir")));
        let error = parse(&["--workdir=/w", "--lifetime-ms=soon"]).unwrap_err();
        assert!(error.to_string().starts_with("--lifetime-ms=soon: "), "{error}");
        assert!(error.source().is_some());
    }
}
