//! Sinks: copies of a run's metrics for other programs.
//!
//! The invariant: the journal is the only source. A [`Sinks`] reads the journaled lines of
//! `metrics.jsonl` and shows them to every [`Sink`], each on a thread of its own, so a slow or
//! failing sink delays neither the run nor another sink. A sink keeps no position in a file of its
//! own: it compares what it has written before with the lines, continues where that ends, and
//! replaces it if it differs. So no line is lost or written twice, wherever the program was killed.
//!
//! Read `follow.rs` next, then the sink of interest.

mod config;
mod csv_file;
mod error;
mod follow;
mod line;
mod parquet_file;
mod prometheus;
mod replace;
mod tensorboard;

pub use config::{SinksSection, SinksSettings};
pub use csv_file::CsvFile;
pub use error::SinkError;
pub use follow::{Sink, Sinks, Warn};
pub use line::Line;
pub use parquet_file::ParquetFile;
pub use prometheus::{Exposition, METRICS_CONTENT_TYPE};
pub use tensorboard::TensorBoard;
