//! Settings, declared once.
//!
//! A section of the configuration is one [`settings!`] block. Each key is written once, with its
//! type, default, limits and description:
//!
//! ```
//! use orchestrate_settings::{above, at_least, settings};
//!
//! settings! {
//!     /// How water is boiled.
//!     [kettle] pub KettleSection -> KettleSettings;
//!
//!     /// Cups to boil at once.
//!     cups: u32 = 2, at_least(1);
//!     /// Litres of water.
//!     litres: f64 = f64::from(cups) * 0.25 => "a quarter of a litre per cup", above(0.0);
//!     /// What to print when the water boils.
//!     message: Option<String> = None => "nothing is printed";
//! }
//!
//! let settings = KettleSection { cups: Some(4), ..Default::default() }.check().unwrap();
//! assert_eq!((settings.cups, settings.litres), (4, 1.0));
//! let problems = KettleSection { cups: Some(0), ..Default::default() }.check().unwrap_err();
//! assert_eq!(problems[0].to_string(), "kettle.cups = 0: must be at least 1");
//! ```
//!
//! The block yields `KettleSection`, the form in which the section is written (every key may be
//! left out, unknown keys are errors), `KettleSettings`, the checked form with every default
//! filled in, and the conversions, checks, JSON schema and documentation rows between them. Rules
//! over several keys are one ordinary function, named by `check:` in the head of the block.
//!
//! [`Layers`] reads configuration files against that schema and reports every problem at once;
//! [`documentation`] prints the page of all keys.

mod docs;
mod key;
mod layers;
mod limit;
mod problems;
mod renames;
mod setting;
mod settings_macro;
mod shape;
mod tls;

pub use docs::documentation;
pub use key::KeyInfo;
pub use layers::{Layers, Origins, is_assignment};
pub use limit::{
    Limit, Number, Predicate, Range, above, at_least, at_most, between, limited, not_blank,
    satisfies, variable_name,
};
pub use problems::Problems;
pub use renames::Renames;
pub use setting::{Section, SectionKeys, Setting};
pub use shape::{closest, list_of};
pub use tls::{TlsClientFiles, TlsClientPem};

#[doc(hidden)]
pub use {schemars, serde, serde_json};
