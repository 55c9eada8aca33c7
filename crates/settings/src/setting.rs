//! The traits behind the [`settings!`](crate::settings) block: types of values, and sections.

use crate::{KeyInfo, Problems};
use camino::Utf8PathBuf;
use orchestrate_types::{ByteSize, ConfigProblem, HumanDuration};
use schemars::{JsonSchema, SchemaGenerator};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A type that a setting can have.
///
/// Implemented for numbers, text, durations, sizes, options and lists of these, for every section,
/// and by [`setting_types!`](crate::setting_types) for enums.
pub trait Setting: Sized {
    /// The form of the value in a configuration file. `Option<T>` has the form of `T`, because a
    /// key without a value is left out.
    type Written: Clone + Serialize + DeserializeOwned + JsonSchema;
    /// The type that limits apply to. For `Option<T>`, that is the type for `T`.
    type Limited: ?Sized;

    /// Converts from the written form.
    fn from_written(written: Self::Written) -> Self;

    /// Converts to the written form; `None` if the key is to be left out.
    fn to_written(&self) -> Option<Self::Written>;

    /// The value that limits apply to; `None` if the setting has no value.
    fn limited(&self) -> Option<&Self::Limited>;

    /// Checks the values nested in this one, whose path in its section is `key`.
    fn check_inside(&self, _key: &str, _problems: &mut Problems) {}

    /// Changes every path of a file or folder in the written form.
    fn map_paths(_written: &mut Self::Written, _map: &mut dyn FnMut(&mut String)) {}
}

/// Implements [`Setting`](crate::Setting) for types that are written as they are.
#[macro_export]
macro_rules! setting_types {
    ($($type:ty),* $(,)?) => {$(
        impl $crate::Setting for $type {
            type Written = Self;
            type Limited = Self;

            fn from_written(written: Self) -> Self {
                written
            }

            fn to_written(&self) -> Option<Self> {
                Some(::std::clone::Clone::clone(self))
            }

            fn limited(&self) -> Option<&Self> {
                Some(self)
            }
        }
    )*};
}

setting_types!(bool, u16, u32, u64, usize, f32, f64, (f64, f64), HumanDuration, ByteSize);

impl Setting for String {
    type Written = Self;
    type Limited = str;

    fn from_written(written: Self) -> Self {
        written
    }

    fn to_written(&self) -> Option<Self> {
        Some(self.clone())
    }

    fn limited(&self) -> Option<&str> {
        Some(self)
    }
}

impl Setting for Utf8PathBuf {
    type Written = String;
    type Limited = str;

    fn from_written(written: String) -> Self {
        written.into()
    }

    fn to_written(&self) -> Option<String> {
        Some(self.to_string())
    }

    fn limited(&self) -> Option<&str> {
        Some(self.as_str())
    }

    fn map_paths(written: &mut String, map: &mut dyn FnMut(&mut String)) {
        map(written);
    }
}

impl<T: Setting> Setting for Option<T> {
    type Written = T::Written;
    type Limited = T::Limited;

    fn from_written(written: T::Written) -> Self {
        Some(T::from_written(written))
    }

    fn to_written(&self) -> Option<T::Written> {
        self.as_ref().and_then(T::to_written)
    }

    fn limited(&self) -> Option<&T::Limited> {
        self.as_ref().and_then(T::limited)
    }

    fn check_inside(&self, key: &str, problems: &mut Problems) {
        if let Some(value) = self {
            value.check_inside(key, problems);
        }
    }

    fn map_paths(written: &mut T::Written, map: &mut dyn FnMut(&mut String)) {
        T::map_paths(written, map);
    }
}

impl<T: Setting> Setting for Vec<T> {
    type Written = Vec<T::Written>;
    type Limited = Self;

    fn from_written(written: Vec<T::Written>) -> Self {
        written.into_iter().map(T::from_written).collect()
    }

    fn to_written(&self) -> Option<Vec<T::Written>> {
        Some(self.iter().filter_map(T::to_written).collect())
    }

    fn limited(&self) -> Option<&Self> {
        Some(self)
    }

    fn check_inside(&self, key: &str, problems: &mut Problems) {
        for (index, value) in self.iter().enumerate() {
            value.check_inside(&format!("{key}[{index}]"), problems);
        }
    }

    fn map_paths(written: &mut Vec<T::Written>, map: &mut dyn FnMut(&mut String)) {
        for value in written {
            T::map_paths(value, map);
        }
    }
}

/// The keys of a section as written, one value or none for each. Implemented by
/// [`settings!`](crate::settings).
pub trait SectionKeys: Clone + Default + Serialize + DeserializeOwned + JsonSchema {
    /// Name of the section, e.g. `rollout`.
    const NAME: &'static str;
    /// Description of the section, line by line.
    const ABOUT: &'static [&'static str];
    /// A struct with a value for every key.
    type Values;

    /// Fills in the defaults.
    fn fill(&self) -> Self::Values;

    /// The section with every value written out.
    fn from_values(values: &Self::Values) -> Self;

    /// Checks each value by itself.
    fn check_values(values: &Self::Values, problems: &mut Problems);

    /// Every key with its type, default, limits and description.
    fn keys(generator: &mut SchemaGenerator) -> Vec<KeyInfo>;

    /// Names of the keys that have a value.
    fn given(&self) -> Vec<&'static str>;

    /// Removes the value of `key`.
    fn clear(&mut self, key: &str);

    /// Changes every path of a file or folder in it.
    fn map_paths(&mut self, map: &mut dyn FnMut(&mut String));
}

/// A section of the configuration.
pub trait Section: SectionKeys {
    /// The checked section, with every default filled in.
    type Settings;

    /// Fills in defaults and checks each value, and all of them together.
    ///
    /// # Errors
    /// All problems of the section at once.
    fn check_section(&self) -> Result<Self::Settings, Vec<ConfigProblem>>;

    /// The section with every value written out.
    fn from_settings(settings: &Self::Settings) -> Self;

    /// Problems of single values alone, for a section in which other keys are already known to be
    /// invalid.
    fn value_problems(&self) -> Vec<ConfigProblem> {
        let mut problems = Problems::new(Self::NAME);
        Self::check_values(&self.fill(), &mut problems);
        problems.into_found()
    }
}
