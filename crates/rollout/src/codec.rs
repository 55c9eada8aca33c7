//! Text to tokens and back, faster than the `tokenizers` library for byte-level tokenizers.
//!
//! The library tracks where each character of a text came from and spends most of its time on that,
//! but nothing here needs it. For the usual kind of tokenizer (text split by regular expressions,
//! then byte-level) the tokenizer's parts are therefore called one after the other without
//! tracking. Any other tokenizer uses the library.
//!
//! The invariant: both ways give the same result. They are compared on a probe text when a
//! tokenizer is loaded.

use aho_corasick::{AhoCorasick, MatchKind};
use orchestrate_types::{TokenId, check_token_ids};
use regex_automata::meta::Regex;
use regex_automata::{Anchored, Input};
use std::collections::HashMap;
use std::ops::Range;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    AddedToken, Model, OffsetReferential, OffsetType, SplitDelimiterBehavior, Tokenizer,
};

/// The regular expression of GPT-2, by which the byte-level step splits text if it is set to.
const GPT2_PATTERN: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Text on which both ways must agree: words, numbers, runs of spaces and line ends, characters of
/// two to four bytes, one that is not composed, and something like a control token.
const PROBE: &str =
    "def f(x):\n    return  x+12345 # it's\t\r\n\n  é e\u{301} 漢字 🦀 <|im_start|>\u{a0}end ";

/// A tokenizer with fast paths for encoding and decoding, where it supports them.
#[derive(Debug)]
pub(crate) struct Codec {
    tokenizer: Tokenizer,
    fast_encoder: Option<FastEncoder>,
    fast_decoder: Option<FastDecoder>,
}

impl Codec {
    pub(crate) fn new(tokenizer: Tokenizer) -> Self {
        let ids = tokenizer.encode_fast(PROBE, false).map(|probe| probe.get_ids().to_vec());
        let ids = ids.unwrap_or_default();
        let fast_encoder = FastEncoder::new(&tokenizer)
            .filter(|encoder| encoder.encode(&tokenizer, PROBE).is_ok_and(|found| found == ids));
        let fast_decoder = FastDecoder::new(&tokenizer).filter(|decoder| {
            tokenizer.decode(&ids, false).is_ok_and(|text| text == decoder.decode(&ids))
        });
        if fast_encoder.is_none() || fast_decoder.is_none() {
            tracing::debug!("the tokenizer is not byte-level: encoding and decoding are slower");
        }
        Self { tokenizer, fast_encoder, fast_decoder }
    }

    /// A tokenizer from the text of its file, without the limits that the last program which used it has left
    /// there: they are not part of the model.
    ///
    /// # Errors
    /// If the file is malformed, or gives a token or an id twice ([`check_token_ids`]).
    pub(crate) fn read(file: &[u8]) -> tokenizers::Result<Tokenizer> {
        let mut tokenizer = Tokenizer::from_bytes(file)?;
        check_token_ids(file, |token| tokenizer.token_to_id(token))?;
        tokenizer.with_truncation(None)?;
        tokenizer.with_padding(None);
        Ok(tokenizer)
    }

    /// The library's tokenizer, for everything but [`Self::encode`] and [`Self::decode`].
    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Token ids of `text`, without any token added around them.
    pub(crate) fn encode(&self, text: &str) -> tokenizers::Result<Vec<TokenId>> {
        match &self.fast_encoder {
            Some(encoder) => encoder.encode(&self.tokenizer, text),
            None => Ok(self.tokenizer.encode_fast(text, false)?.get_ids().to_vec()),
        }
    }

    /// Text of `ids`, including control tokens. Bytes that are not UTF-8 become U+FFFD; unknown ids
    /// are left out.
    pub(crate) fn decode(&self, ids: &[TokenId]) -> tokenizers::Result<String> {
        match &self.fast_decoder {
            Some(decoder) => Ok(decoder.decode(ids)),
            None => self.tokenizer.decode(ids, false),
        }
    }

    /// Whether the text of tokens is their bytes, one after the other.
    pub(crate) fn is_byte_level(&self) -> bool {
        self.fast_decoder.is_some()
    }

    /// The bytes of one token of a byte-level tokenizer.
    pub(crate) fn known_bytes(&self, id: TokenId) -> &[u8] {
        self.fast_decoder.as_ref().map(|decoder| decoder.bytes(id)).unwrap_or_default()
    }

    /// The bytes of one token; of a part of a character, where the tokenizer does not tell them, those
    /// of U+FFFD.
    pub(crate) fn token_bytes(&self, id: TokenId) -> Vec<u8> {
        match &self.fast_decoder {
            Some(decoder) => decoder.bytes(id).to_vec(),
            None => self.tokenizer.decode(&[id], false).unwrap_or_default().into_bytes(),
        }
    }
}

/// Splits text into words as a byte-level tokenizer does, and encodes each with its model.
#[derive(Debug)]
struct FastEncoder {
    /// Added tokens in the order in which they are searched; `None` where the library must find
    /// them.
    added: Option<Vec<AddedTokens>>,
    /// Each splits the pieces that the one before it left. Matches and the text between them are
    /// words.
    splitters: Vec<Splitter>,
    /// Texts that the normalizer does not change.
    unchanged_by_normalizer: TextKind,
    byte_chars: [char; 256],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TextKind {
    All,
    Ascii,
    None,
}

impl FastEncoder {
    /// `None` if the tokenizer has a step that this does not implement.
    fn new(tokenizer: &Tokenizer) -> Option<Self> {
        if tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some() {
            return None;
        }
        let steps = match tokenizer.get_pre_tokenizer()? {
            PreTokenizerWrapper::Sequence(steps) => steps.as_ref(),
            step => std::slice::from_ref(step),
        };
        let (last, steps) = steps.split_last()?;
        let mut splitters = Vec::new();
        for step in steps {
            match step {
                PreTokenizerWrapper::Split(split)
                    if split.behavior == SplitDelimiterBehavior::Isolated =>
                {
                    splitters.push(Splitter::new(split.clone()));
                }
                _ => return None,
            }
        }
        match last {
            PreTokenizerWrapper::ByteLevel(ByteLevel {
                add_prefix_space: false,
                use_regex,
                ..
            }) => {
                if *use_regex {
                    let pattern = SplitPattern::Regex(GPT2_PATTERN.to_owned());
                    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
                    splitters.push(Splitter::new(split.ok()?));
                }
            }
            _ => return None,
        }
        let unchanged_by_normalizer = match tokenizer.get_normalizer() {
            None => TextKind::All,
            Some(NormalizerWrapper::Sequence(steps)) if steps.as_ref().is_empty() => TextKind::All,
            Some(NormalizerWrapper::NFC(_)) => TextKind::Ascii,
            Some(_) => TextKind::None,
        };
        let added = AddedTokens::in_search_order(tokenizer, unchanged_by_normalizer);
        Some(Self { added, splitters, unchanged_by_normalizer, byte_chars: byte_chars() })
    }

    fn encode(&self, tokenizer: &Tokenizer, text: &str) -> tokenizers::Result<Vec<TokenId>> {
        let mut encoding = Encoding {
            tokenizer,
            encoder: self,
            ids: Vec::with_capacity(text.len() / 3),
            word_chars: String::new(),
        };
        let is_normalized = match self.unchanged_by_normalizer {
            TextKind::All => true,
            TextKind::Ascii => text.is_ascii(),
            TextKind::None => false,
        };
        match &self.added {
            Some(added) if is_normalized => encoding.add_normalized(text, added)?,
            Some(_) | None => encoding.add_by_library(text, is_normalized)?,
        }
        Ok(encoding.ids)
    }
}

/// Tokens outside the model's vocabulary, which are searched in a text before it is split.
#[derive(Debug)]
struct AddedTokens {
    search: AhoCorasick,
    ids: Vec<TokenId>,
}

impl AddedTokens {
    /// The tokens that are searched first, then those that are searched in the text between them.
    /// `None` if a token matches by more than its text.
    fn in_search_order(tokenizer: &Tokenizer, unchanged: TextKind) -> Option<Vec<Self>> {
        let vocabulary = tokenizer.get_added_vocabulary();
        let mut tokens: Vec<_> = vocabulary.get_added_tokens_decoder().iter().collect();
        tokens.sort_unstable_by_key(|(id, _)| **id);
        let is_plain = |token: &AddedToken| {
            let is_normalized =
                !token.normalized || unchanged == TextKind::All || token.content.is_ascii();
            is_normalized
                && !token.content.is_empty()
                && !token.single_word
                && !token.lstrip
                && !token.rstrip
        };
        if vocabulary.get_encode_special_tokens()
            || !tokens.iter().all(|(_, token)| is_plain(token))
        {
            return None;
        }
        let search = |normalized: bool| {
            let tokens = tokens.iter().filter(|(_, token)| token.normalized == normalized);
            let (ids, contents): (Vec<TokenId>, Vec<&str>) =
                tokens.map(|(id, token)| (**id, token.content.as_str())).unzip();
            let mut search = AhoCorasick::builder();
            let search = search.match_kind(MatchKind::LeftmostLongest).build(contents).ok()?;
            Some(Self { search, ids })
        };
        Some(vec![search(false)?, search(true)?])
    }
}

/// One regular expression that splits text into words.
#[derive(Debug)]
enum Splitter {
    /// The expression has no part that needs backtracking.
    Automaton(Regex),
    Library(Box<Split>),
}

/// How the expressions of most model families end: of several spaces the last one belongs to the
/// next word. The look-ahead is the only part that an automaton cannot match, so it is done by
/// hand.
const SPACES: &str = r"|\s+(?!\S)|\s+";
/// Index of `\s+` among an automaton's expressions.
const SPACES_INDEX: usize = 1;

impl Splitter {
    fn new(split: Split) -> Self {
        let automaton = match &split.pattern {
            SplitPattern::Regex(pattern) => match pattern.strip_suffix(SPACES) {
                Some(words) => Regex::new_many(&[words, r"\s+"]).ok(),
                None => Regex::new(pattern).ok(),
            },
            SplitPattern::String(_) => None,
        };
        automaton.map_or_else(|| Self::Library(Box::new(split)), Self::Automaton)
    }

    /// Calls `take` with each match in `text`, in order.
    fn for_each_match(
        &self,
        text: &str,
        mut take: impl FnMut(Range<usize>) -> tokenizers::Result<()>,
    ) -> tokenizers::Result<()> {
        let regex = match self {
            Self::Automaton(regex) => regex,
            Self::Library(split) => {
                return split.regex.find_iter(text).try_for_each(|(start, end)| take(start..end));
            }
        };
        let mut position = 0;
        while position < text.len() {
            let input = Input::new(text).range(position..);
            // A word nearly always starts where the last one ended, so try there before searching.
            let here = regex.search(&input.clone().anchored(Anchored::Yes));
            let Some(found) = here.or_else(|| regex.search(&input)) else { break };
            let mut end = found.end();
            if found.pattern().as_usize() == SPACES_INDEX && end < text.len() {
                let spaces = text.get(found.range()).unwrap_or_default();
                let last = spaces.chars().next_back().map_or(0, char::len_utf8);
                if last < spaces.len() {
                    end -= last;
                }
            }
            let is_empty = end == found.start();
            take(found.start()..end)?;
            // After an empty match the search continues one character later.
            let next = text.get(end..).and_then(|rest| rest.chars().next()).filter(|_| is_empty);
            position = end + next.map_or(usize::from(is_empty), char::len_utf8);
        }
        Ok(())
    }
}

/// The tokens of one text while it is encoded.
struct Encoding<'a> {
    tokenizer: &'a Tokenizer,
    encoder: &'a FastEncoder,
    ids: Vec<TokenId>,
    /// Buffer for the byte characters of one word.
    word_chars: String,
}

impl Encoding<'_> {
    /// Encodes normalized text in which the tokens of `added` still have to be found.
    fn add_normalized(&mut self, text: &str, added: &[AddedTokens]) -> tokenizers::Result<()> {
        let Some((first, rest)) = added.split_first() else {
            return self.add_piece(text, &self.encoder.splitters);
        };
        let mut done = 0;
        for found in first.search.find_iter(text) {
            self.add_normalized(text.get(done..found.start()).unwrap_or_default(), rest)?;
            self.ids.extend(first.ids.get(found.pattern().as_usize()));
            done = found.end();
        }
        self.add_normalized(text.get(done..).unwrap_or_default(), rest)
    }

    /// Encodes text that the library normalizes and searches for added tokens.
    fn add_by_library(&mut self, text: &str, is_normalized: bool) -> tokenizers::Result<()> {
        let normalizer = if is_normalized { None } else { self.tokenizer.get_normalizer() };
        let pieces = self.tokenizer.get_added_vocabulary().extract_and_normalize(normalizer, text);
        for (piece, _, added) in pieces.get_splits(OffsetReferential::Normalized, OffsetType::None)
        {
            match added {
                Some(added) => self.ids.extend(added.iter().map(|token| token.id)),
                None => self.add_piece(piece, &self.encoder.splitters)?,
            }
        }
        Ok(())
    }

    /// Encodes text between added tokens, which `splitters` still have to split.
    fn add_piece(&mut self, text: &str, splitters: &[Splitter]) -> tokenizers::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let Some((first, rest)) = splitters.split_first() else { return self.add_word(text) };
        let mut done = 0;
        first.for_each_match(text, |found| {
            self.add_piece(text.get(done..found.start).unwrap_or_default(), rest)?;
            done = found.end;
            self.add_piece(text.get(found).unwrap_or_default(), rest)
        })?;
        self.add_piece(text.get(done..).unwrap_or_default(), rest)
    }

    fn add_word(&mut self, word: &str) -> tokenizers::Result<()> {
        let byte_chars = &self.encoder.byte_chars;
        self.word_chars.clear();
        self.word_chars.extend(word.bytes().filter_map(|byte| byte_chars.get(usize::from(byte))));
        let tokens = self.tokenizer.get_model().tokenize(&self.word_chars)?;
        self.ids.extend(tokens.iter().map(|token| token.id));
        Ok(())
    }
}

/// The bytes of each token of a byte-level tokenizer.
#[derive(Debug)]
struct FastDecoder {
    /// Bytes of all tokens, in the order of their ids.
    bytes: Vec<u8>,
    /// By id: the end of its bytes, which start at the end of the previous id. Unknown ids have
    /// none.
    ends: Vec<usize>,
}

impl FastDecoder {
    /// `None` if the tokenizer is not byte-level.
    fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let Some(DecoderWrapper::ByteLevel(_)) = tokenizer.get_decoder() else { return None };
        let bytes_of: HashMap<char, u8> = byte_chars().into_iter().zip(0..=u8::MAX).collect();
        let last = tokenizer.get_vocab(true).into_values().max()?;
        // The table would be mostly empty.
        if last as usize > 2 * tokenizer.get_vocab_size(true) {
            return None;
        }
        let mut table = Self { bytes: Vec::new(), ends: Vec::new() };
        for id in 0..=last {
            let token = tokenizer.id_to_token(id).unwrap_or_default();
            let bytes: Option<Vec<u8>> = token.chars().map(|c| bytes_of.get(&c).copied()).collect();
            // An added token may be stored as plain text.
            table.bytes.extend(bytes.unwrap_or_else(|| token.into_bytes()));
            table.ends.push(table.bytes.len());
        }
        Some(table)
    }

    /// The bytes of one token.
    fn bytes(&self, id: TokenId) -> &[u8] {
        let id = id as usize;
        let start = id.checked_sub(1).and_then(|before| self.ends.get(before));
        let end = self.ends.get(id).copied().unwrap_or(0);
        self.bytes.get(start.copied().unwrap_or(0)..end).unwrap_or_default()
    }

    fn decode(&self, ids: &[TokenId]) -> String {
        let mut bytes = Vec::with_capacity(4 * ids.len());
        for &id in ids {
            bytes.extend_from_slice(self.bytes(id));
        }
        String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}

/// The character for each byte in the tokens of byte-level tokenizers: the byte itself if it is
/// printable, else one from U+0100 on.
fn byte_chars() -> [char; 256] {
    let mut replacements = (0x100..).filter_map(char::from_u32);
    std::array::from_fn(|byte| match u8::try_from(byte) {
        Ok(byte @ (b'!'..=b'~' | 0xA1..=0xAC | 0xAE..)) => char::from(byte),
        _ => replacements.next().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests;
