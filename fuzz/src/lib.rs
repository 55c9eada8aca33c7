//! What the fuzz targets share: inputs that are valid but for what was changed in them, decoders
//! that are slow and plain, and a bound on memory.

pub mod heap;
pub mod input;
pub mod naive;
