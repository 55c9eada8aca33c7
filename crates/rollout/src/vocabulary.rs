//! Trains the byte-level tokenizer of the small models.

use crate::chat::{ChatError, ChatErrorKind};
use camino::Utf8Path;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, SplitDelimiterBehavior,
    Tokenizer, TokenizerBuilder,
};

/// Chat template of the small models for the `micro` environment.
pub const MICRO_CHAT_TEMPLATE: &str =
    include_str!("../../../environments/micro/chat_template.jinja");

/// Control tokens of the small models, in the order of their ids, which start at 0.
pub const CONTROL_TOKENS: [&str; 5] =
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"];

/// Trains a byte-level BPE tokenizer on rendered conversations and writes it to `folder`.
///
/// Writes `tokenizer.json`, `tokenizer_config.json` (with `chat_template`) and
/// `generation_config.json`. Returns the number of vocabulary entries: `vocab_size`, or fewer if
/// the corpus has too few distinct pieces.
///
/// Text is first split into letters, digits and everything else, so that a word is the same token
/// after a space, a bracket or an underscore.
///
/// # Errors
/// If training fails or a file cannot be written.
pub fn train_tokenizer(
    corpus: impl Iterator<Item = String> + Send,
    vocab_size: usize,
    chat_template: &str,
    folder: &Utf8Path,
) -> Result<usize, ChatError> {
    train(corpus, vocab_size, chat_template, folder)
        .map_err(|kind| ChatError { folder: folder.to_owned(), kind })
}

fn train(
    corpus: impl Iterator<Item = String> + Send,
    vocab_size: usize,
    chat_template: &str,
    folder: &Utf8Path,
) -> Result<usize, ChatErrorKind> {
    let pattern = SplitPattern::Regex(r"\p{L}+|\p{N}+|[^\p{L}\p{N}]+".to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
        .map_err(ChatErrorKind::Tokenizer)?;
    let pre_tokenizer = Sequence::new(vec![
        PreTokenizerWrapper::Split(split),
        PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, false)),
    ]);
    let mut tokenizer = TokenizerBuilder::<
        BPE,
        NormalizerWrapper,
        PreTokenizerWrapper,
        PostProcessorWrapper,
        DecoderWrapper,
    >::new()
    .with_model(BPE::default())
    .with_pre_tokenizer(Some(PreTokenizerWrapper::Sequence(pre_tokenizer)))
    .with_decoder(Some(DecoderWrapper::ByteLevel(ByteLevel::new(false, false, false))))
    .build()
    .map_err(ChatErrorKind::Tokenizer)?;
    let mut trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(vocab_size)
        .min_frequency(2)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(CONTROL_TOKENS.iter().map(|t| AddedToken::from(*t, true)).collect())
        .build();
    // Control tokens are removed from the corpus: their letters must not become vocabulary entries.
    let pieces = corpus.flat_map(|text| without_control_tokens(&text));
    tokenizer.train(&mut trainer, pieces).map_err(ChatErrorKind::Tokenizer)?;

    let invalid = |error: serde_json::Error| ChatErrorKind::Tokenizer(error.into());
    let text = serde_json::to_string(&tokenizer).map_err(invalid)?;
    let tokenizer: Tokenizer = serde_json::from_str(&text).map_err(invalid)?;
    let [end_of_text, _, end_of_turn, _, _] = CONTROL_TOKENS;
    let config = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_of_turn,
        "pad_token": end_of_text,
        "clean_up_tokenization_spaces": false,
        "chat_template": chat_template,
    });
    let generation = serde_json::json!({
        "eos_token_id": tokenizer.token_to_id(end_of_turn),
        "pad_token_id": tokenizer.token_to_id(end_of_text),
    });
    fs_err::create_dir_all(folder)?;
    fs_err::write(folder.join("tokenizer.json"), text)?;
    fs_err::write(folder.join("tokenizer_config.json"), format!("{config:#}\n"))?;
    fs_err::write(folder.join("generation_config.json"), format!("{generation:#}\n"))?;
    Ok(tokenizer.get_vocab_size(true))
}

fn without_control_tokens(text: &str) -> Vec<String> {
    let mut pieces = vec![text.to_owned()];
    for token in CONTROL_TOKENS {
        pieces = pieces.iter().flat_map(|p| p.split(token)).map(ToOwned::to_owned).collect();
    }
    pieces.retain(|piece| !piece.is_empty());
    pieces
}
