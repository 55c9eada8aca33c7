//! The embedded inference engine: Qwen3-MoE on CPU behind SGLang's HTTP form.

mod kernels;
mod model;
