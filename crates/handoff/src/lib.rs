//! From rollouts to the trainer: advantages, batch files, trainer protocol client.
//!
//! The invariant: a batch folder is either complete or absent (the manifest is written last), and
//! its bytes never change once published.
//!
//! [`group_advantages`] → [`write_batch`] → [`TrainerClient::apply_step`]; a trainer reads with
//! [`Batch::open`], or any safetensors reader by the layout in [`batch`].

mod advantage;
mod algorithm;
pub mod batch;
mod client;
mod condition;
mod config;
mod metrics;
mod overlong;
pub mod protocol;
pub mod rules;

pub use advantage::{AdvantageNorm, GroupAdvantages, GroupSignal, group_advantages};
pub use algorithm::{
    AggregationSettings, AlgorithmSection, AlgorithmSettings, BranchWeight, CorrectionSettings,
    KlEstimatorSettings, KlSettings, LossSettings, OptimizerSettings, ReplaySettings,
    RouterShiftSettings, TruncatedEpisodes,
};
pub use batch::{
    Batch, BatchError, BatchErrorKind, BatchMeta, BatchSample, Manifest, Planned, RecordEntry,
    Rows, Sequence, ShardEntry, stream_batch, write_batch,
};
pub use client::{TrainerClient, TrainerError, TrainerErrorKind};
pub use config::{HandoffSection, HandoffSettings, TrainerSection, TrainerSettings};
pub use orchestrate_settings::TlsClientPem;
pub use overlong::Overlong;
