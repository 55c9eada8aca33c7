//! The commands, one module each.

pub(crate) mod analyze;
pub(crate) mod compare;
pub(crate) mod config;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod gateway;
pub(crate) mod gc;
pub(crate) mod grade;
pub(crate) mod remove_unstarted;
pub(crate) mod run;
pub(crate) mod runs;
pub(crate) mod serve;
pub(crate) mod show;
pub(crate) mod status;
pub(crate) mod tasks;
pub(crate) mod warm_start;
