//! The blocks that `declaration.rs` is written in.

/// Declares a type of named options: `Choice, default Variant { /// .. Variant "name", .. }`.
macro_rules! named {
    (
        $(#[doc = $about:literal])*
        $choice:ident, default $default:ident {
            $($(#[doc = $doc:literal])* $variant:ident $name:literal,)*
        }
    ) => {
        $(#[doc = $about])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq,
            serde::Serialize, serde::Deserialize, schemars::JsonSchema,
        )]
        pub enum $choice {
            $(
                $(#[doc = $doc])*
                #[serde(rename = $name)]
                $variant,
            )*
        }

        impl Default for $choice {
            fn default() -> Self {
                Self::$default
            }
        }

        impl $choice {
            /// Every option.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// The name in requests and configurations.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }

        orchestrate_settings::setting_types!($choice);

        impl crate::algorithm::Hyperparameter for $choice {
            type Sent = Self;
            const PYTHON: &'static str = "str";

            fn sent(&self) -> Self {
                *self
            }

            fn from_sent(sent: Self) -> Self {
                sent
            }

            fn value(sent: &Self) -> crate::condition::FieldValue {
                crate::condition::FieldValue::Choice(sent.name())
            }

            fn options() -> Vec<&'static str> {
                Self::ALL.iter().map(|option| option.name()).collect()
            }
        }
    };
}

/// Declares a hyperparameter that chooses among named options, and for each option the
/// hyperparameters that apply with it.
///
/// ```text
/// choice! {
///     /// Description.
///     key: Choice -> ChoiceSettings, default Variant {
///         /// Description of the option.
///         Variant "name" { applies, applies, .. } fixed { key = value } with { key: KeySettings },
///     }
/// }
/// ```
///
/// `Choice` is the name as sent to a trainer. `ChoiceSettings` is a sum type that holds, for each
/// option, only the hyperparameters that apply with it: `with` names one that is itself a choice,
/// `fixed` one that has a single possible value with this option.
macro_rules! choice {
    (
        $(#[doc = $about:literal])*
        $key:ident: $choice:ident -> $settings:ident, default $default:ident {
            $(
                $(#[doc = $doc:literal])*
                $variant:ident $name:literal { $($field:ident),* $(,)? }
                $(fixed { $($fixed:ident = $value:expr),* $(,)? })?
                $(with { $nested:ident: $nested_settings:ident })?,
            )*
        }
    ) => {
        crate::algorithm::macros::named! {
            $(#[doc = $about])*
            $choice, default $default {
                $($(#[doc = $doc])* $variant $name,)*
            }
        }

        impl $choice {
            pub(crate) const CHOICE: crate::algorithm::Choice = crate::algorithm::Choice {
                key: stringify!($key),
                options: &[$(
                    crate::algorithm::ChoiceOption {
                        name: $name,
                        applies: &[$(stringify!($field),)* $(stringify!($nested))?],
                        fixed: &[$($(stringify!($fixed)),*)?],
                    },
                )*],
            };
        }

        $(#[doc = $about])*
        ///
        /// Each option holds the hyperparameters that apply with it.
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub enum $settings {
            $(
                $(#[doc = $doc])*
                $variant {
                    $(
                        #[doc = concat!("See [`Hyperparameters::", stringify!($field), "`].")]
                        $field: types::$field,
                    )*
                    $(
                        #[doc = concat!("See [`Hyperparameters::", stringify!($nested), "`].")]
                        $nested: $nested_settings,
                    )?
                },
            )*
        }

        impl $settings {
            /// The option in `h`, with what applies to it.
            pub(crate) fn read(h: &Hyperparameters) -> Self {
                match h.$key {
                    $(
                        $choice::$variant => Self::$variant {
                            $($field: h.$field,)*
                            $($nested: $nested_settings::read(h),)?
                        },
                    )*
                }
            }

            /// The option without what applies to it.
            pub fn choice(&self) -> $choice {
                match self {
                    $(Self::$variant { .. } => $choice::$variant,)*
                }
            }

            /// Sets the option in `h`, and what applies to it.
            pub(crate) fn write(&self, h: &mut Hyperparameters) {
                match self {
                    $(
                        Self::$variant { $($field,)* $($nested,)? } => {
                            h.$key = $choice::$variant;
                            $(h.$field = *$field;)*
                            $($(h.$fixed = $value;)*)?
                            $($nested.write(h);)?
                        }
                    )*
                }
            }
        }
    };
}

/// Declares the hyperparameters.
///
/// ```text
/// hyperparameters! {
///     amend: function;   // completes what is known about the keys
///     sent {       // keys of [algorithm] that are sent to the trainer
///         /// Description.
///         key: Type = default, presence, bound, bound;
///     }
///     kept {       // keys of [algorithm] that only the orchestrator uses
///         key: Type = default => "default as text";
///     }
///     per_step {   // not in [algorithm]: set for each step
///         key: Type = default, bound;
///     }
/// }
/// ```
///
/// A default may depend on the keys above it. The presence says what a request without the key
/// means: `required` is an error, `optional` means the default of an empty section, and `nullable`
/// means none. Bounds are those of [`condition`](crate::condition).
macro_rules! hyperparameters {
    (
        amend: $amend:path;
        sent {
            $(
                $(#[doc = $doc:literal])*
                $name:ident: $type:ty = $default:expr, $presence:ident $(, $bound:expr)*;
            )*
        }
        kept {
            $(
                $(#[doc = $kept_doc:literal])*
                $kept:ident: $kept_type:ty = $kept_default:expr $(=> $kept_text:literal)?;
            )*
        }
        per_step {
            $(
                $(#[doc = $step_doc:literal])*
                $step:ident: $step_type:ty = $step_default:expr $(, $step_bound:expr)*;
            )*
        }
    ) => {
        orchestrate_settings::declare_section! {
            /// How rewards become an update of the weights.
            [algorithm] pub AlgorithmSection -> AlgorithmValues,
                amend: $amend;

            $(
                $(#[doc = $doc])*
                $name: $type = $default;
            )*
            $(
                $(#[doc = $kept_doc])*
                $kept: $kept_type = $kept_default $(=> $kept_text)?;
            )*
        }

        /// The type of each hyperparameter as sent to a trainer.
        #[expect(non_camel_case_types, reason = "named as the hyperparameters")]
        #[expect(dead_code, reason = "some belong to no choice")]
        pub(crate) mod types {
            use crate::algorithm::declaration::*;

            $(pub(crate) type $name = <$type as crate::algorithm::Hyperparameter>::Sent;)*
        }

        /// Everything an update depends on besides the batch, as sent to a trainer.
        ///
        /// Hyperparameters that version 1 of the protocol did not have from the start may be absent
        /// from a request. Those that do not apply to the chosen options have no effect.
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(try_from = "PartialHyperparameters")]
        pub struct Hyperparameters {
            $(
                $(#[doc = $doc])*
                pub $name: <$type as crate::algorithm::Hyperparameter>::Sent,
            )*
            $(
                $(#[doc = $step_doc])*
                pub $step: $step_type,
            )*
        }

        /// A request's hyperparameters before absent ones are filled in.
        #[derive(serde::Deserialize)]
        struct PartialHyperparameters {
            $($name: Option<<$type as crate::algorithm::Hyperparameter>::Sent>,)*
            $($step: Option<$step_type>,)*
        }

        impl TryFrom<PartialHyperparameters> for Hyperparameters {
            type Error = String;

            fn try_from(given: PartialHyperparameters) -> Result<Self, String> {
                let defaults = Self::default();
                Ok(Self {
                    $($name: hyperparameters!(@$presence given, defaults, $name),)*
                    $($step: hyperparameters!(@required given, defaults, $step),)*
                })
            }
        }

        /// Those of an empty `[algorithm]`, at temperature 1.
        impl Default for Hyperparameters {
            fn default() -> Self {
                AlgorithmValues::default().sent()
            }
        }

        impl AlgorithmValues {
            /// The hyperparameters that are sent to a trainer, at temperature 1.
            pub(crate) fn sent(&self) -> Hyperparameters {
                Hyperparameters {
                    $($name: crate::algorithm::Hyperparameter::sent(&self.$name),)*
                    $($step: $step_default,)*
                }
            }
        }

        impl AlgorithmSection {
            /// The section that sends `h`, without the keys that are not sent.
            pub(crate) fn sending(h: &Hyperparameters) -> Self {
                Self {
                    $(
                        $name: orchestrate_settings::Setting::to_written(
                            &<$type as crate::algorithm::Hyperparameter>::from_sent(h.$name),
                        ),
                    )*
                    $($kept: None,)*
                }
            }
        }

        impl Hyperparameters {
            /// Every hyperparameter, in the order of declaration.
            pub(crate) fn fields() -> Vec<crate::algorithm::Field> {
                vec![
                    $(
                        crate::algorithm::Field {
                            name: stringify!($name),
                            description: &[$($doc),*],
                            python: <$type as crate::algorithm::Hyperparameter>::PYTHON,
                            options: <$type as crate::algorithm::Hyperparameter>::options(),
                            presence: hyperparameters!(@presence $presence),
                            bounds: vec![$(crate::condition::Bound::from($bound)),*],
                        },
                    )*
                    $(
                        crate::algorithm::Field {
                            name: stringify!($step),
                            description: &[$($step_doc),*],
                            python: <$step_type as crate::algorithm::Hyperparameter>::PYTHON,
                            options: <$step_type as crate::algorithm::Hyperparameter>::options(),
                            presence: hyperparameters!(@presence required),
                            bounds: vec![$(crate::condition::Bound::from($step_bound)),*],
                        },
                    )*
                ]
            }

            /// The value of the hyperparameter called `name`; `Off` for unknown names.
            pub(crate) fn value(&self, name: &str) -> crate::condition::FieldValue {
                $(
                    if name == stringify!($name) {
                        return <$type as crate::algorithm::Hyperparameter>::value(&self.$name);
                    }
                )*
                $(
                    if name == stringify!($step) {
                        return <$step_type as crate::algorithm::Hyperparameter>::value(&self.$step);
                    }
                )*
                crate::condition::FieldValue::Off
            }
        }
    };
    (@presence required) => { crate::algorithm::Presence::Required };
    (@presence optional) => { crate::algorithm::Presence::Optional };
    (@presence nullable) => { crate::algorithm::Presence::Nullable };
    (@required $given:ident, $defaults:ident, $name:ident) => {
        $given.$name.ok_or(concat!("missing field `", stringify!($name), "`"))?
    };
    (@optional $given:ident, $defaults:ident, $name:ident) => {
        $given.$name.unwrap_or($defaults.$name)
    };
    (@nullable $given:ident, $defaults:ident, $name:ident) => {
        $given.$name.unwrap_or(None)
    };
}

pub(crate) use {choice, hyperparameters, named};
