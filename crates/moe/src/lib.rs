//! moe
