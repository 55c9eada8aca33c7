//! The bundled policy's tokenizer and template.

use crate::chat::ChatModel;
use camino::{Utf8Path, Utf8PathBuf};
use std::sync::{Arc, OnceLock};

/// The folder of the bundled policy.
pub(super) fn policy() -> Utf8PathBuf {
    Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../../environments/micro/policy")
}

pub(super) fn chat() -> Arc<ChatModel> {
    static CHAT: OnceLock<Arc<ChatModel>> = OnceLock::new();
    Arc::clone(CHAT.get_or_init(|| Arc::new(ChatModel::load(&policy()).unwrap())))
}
