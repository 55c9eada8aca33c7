//! Shared by the fuzz targets: valid inputs with a few changes, slow and simple decoders, and a bound
//! on memory.

pub mod heap;
pub mod input;
pub mod naive;
