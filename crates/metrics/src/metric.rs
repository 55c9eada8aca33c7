//! One metric, and the macro that declares the metrics of a line together with its fields.

/// Declares the struct of one kind of line, and the list of its metrics.
///
/// Each field has a doc comment (the meaning), a type, a unit with its range, and optionally what is
/// healthy. All measurements are optional: a line written by an older version may lack any of them.
macro_rules! metrics_line {
    (
        $(#[$attribute:meta])*
        $name:ident {
            $(
                $(#[doc = $meaning:literal])+
                $field:ident: $type:ty, $unit:literal $(, healthy: $healthy:literal)?;
            )*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, PartialEq, Default, serde::Serialize, serde::Deserialize)]
        pub struct $name {
            /// Version of the line's format; 0 in lines written before it was recorded.
            #[serde(default)]
            pub schema_version: u32,
            /// When the line was written, UTC; `None` in lines written before it was recorded.
            pub time: Option<jiff::Timestamp>,
            /// Global step that the line belongs to; 0 = the evaluation before training.
            pub global_step: u32,
            /// Version of the weights that engines serve after the step, or that were evaluated.
            pub policy_version: orchestrate_types::PolicyVersion,
            $(
                $(#[doc = $meaning])+
                #[doc = concat!("\n\nUnit: ", $unit, ".")]
                $(#[doc = concat!("Healthy: ", $healthy, ".")])?
                pub $field: Option<$type>,
            )*
        }

        impl $name {
            /// The metrics of this line, in the order in which they are written.
            pub const METRICS: &'static [$crate::Metric] = &[
                $($crate::Metric {
                    name: stringify!($field),
                    unit: $unit,
                    kind: $crate::ValueKind::of(stringify!($type)),
                    meaning: concat!($($meaning),+),
                    healthy: metrics_line!(@healthy $($healthy)?),
                },)*
            ];
        }
    };
    (@healthy) => { None };
    (@healthy $healthy:literal) => { Some($healthy) };
}
pub(crate) use metrics_line;

/// One metric: a key of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// The key, and the name of the field.
    pub name: &'static str,
    /// Unit and range, for example `share, 0 to 1`.
    pub unit: &'static str,
    /// Form of its values.
    pub kind: ValueKind,
    /// What it measures. Markdown, with a space in front of every line.
    pub meaning: &'static str,
    /// What to expect of a healthy run; `None` where nothing can be said in general.
    pub healthy: Option<&'static str>,
}

/// Form of a metric's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// A whole number, at least 0.
    Count,
    /// A number.
    Number,
    /// An object or a list of numbers.
    Structured,
}

impl ValueKind {
    /// The form of the values of a Rust type, given by its name.
    pub(crate) const fn of(rust_type: &str) -> Self {
        match rust_type.as_bytes() {
            b"u64" => Self::Count,
            b"f64" => Self::Number,
            _ => Self::Structured,
        }
    }
}
