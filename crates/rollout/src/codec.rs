//! Text to tokens and back.
//!
//! The library keeps, for each character of a text, where it came from, and passes text between its
//! steps in pieces that carry this along: most of the time it takes goes there. Nobody here asks for
//! it. So where a tokenizer is of the usual kind (words cut by expressions, then byte-level), its
//! parts are called one after the other without; any other goes the library's own way.

use aho_corasick::{AhoCorasick, MatchKind};
use orchestrate_types::TokenId;
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

/// What the byte-level step cuts words by, where it is told to: the expression of GPT-2.
const GPT2_WORDS: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Both ways must agree on this: words, numbers, runs of blanks and ends of lines, letters of two to
/// four bytes, one that is not composed, and something like a control token.
const PROBE: &str =
    "def f(x):\n    return  x+12345 # it's\t\r\n\n  é e\u{301} 漢字 🦀 <|im_start|>\u{a0}end ";

/// A tokenizer.
#[derive(Debug)]
pub(crate) struct Codec {
    tokenizer: Tokenizer,
    words: Option<Words>,
    bytes: Option<TokenBytes>,
}

impl Codec {
    pub(crate) fn new(tokenizer: Tokenizer) -> Self {
        let ids = tokenizer.encode_fast(PROBE, false).map(|probe| probe.get_ids().to_vec());
        let ids = ids.unwrap_or_default();
        let words = Words::of(&tokenizer)
            .filter(|words| words.encode(&tokenizer, PROBE).is_ok_and(|found| found == ids));
        let bytes = TokenBytes::of(&tokenizer).filter(|bytes| {
            tokenizer.decode(&ids, false).is_ok_and(|text| text == bytes.text(&ids))
        });
        if words.is_none() || bytes.is_none() {
            tracing::debug!("a tokenizer of an unusual kind: long texts take longer");
        }
        Self { tokenizer, words, bytes }
    }

    /// The library's tokenizer, for all but [`Self::encode`] and [`Self::decode`].
    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Tokens of `text`, nothing added.
    pub(crate) fn encode(&self, text: &str) -> tokenizers::Result<Vec<TokenId>> {
        match &self.words {
            Some(words) => words.encode(&self.tokenizer, text),
            None => Ok(self.tokenizer.encode_fast(text, false)?.get_ids().to_vec()),
        }
    }

    /// Text of `ids`, control tokens included. Bytes that are no UTF-8 become U+FFFD, and ids that
    /// are none are left out.
    pub(crate) fn decode(&self, ids: &[TokenId]) -> tokenizers::Result<String> {
        match &self.bytes {
            Some(bytes) => Ok(bytes.text(ids)),
            None => self.tokenizer.decode(ids, false),
        }
    }
}

/// How a byte-level tokenizer cuts text into the words that its model sees.
#[derive(Debug)]
struct Words {
    added: Option<Vec<Added>>,
    /// Each cuts what the one before it left whole. Matches and what lies between them are words.
    cuts: Vec<Cut>,
    /// Which texts are normal as they are.
    normal: Normal,
    letters: [char; 256],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Normal {
    All,
    Ascii,
    None,
}

impl Words {
    /// `None` where the tokenizer does more to a text than this.
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        if tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some() {
            return None;
        }
        let steps = match tokenizer.get_pre_tokenizer()? {
            PreTokenizerWrapper::Sequence(steps) => steps.as_ref(),
            step => std::slice::from_ref(step),
        };
        let (last, steps) = steps.split_last()?;
        let mut cuts = Vec::new();
        for step in steps {
            match step {
                PreTokenizerWrapper::Split(split)
                    if split.behavior == SplitDelimiterBehavior::Isolated =>
                {
                    cuts.push(Cut::of(split.clone()));
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
                    let pattern = SplitPattern::Regex(GPT2_WORDS.to_owned());
                    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
                    cuts.push(Cut::of(split.ok()?));
                }
            }
            _ => return None,
        }
        let normal = match tokenizer.get_normalizer() {
            None => Normal::All,
            Some(NormalizerWrapper::Sequence(steps)) if steps.as_ref().is_empty() => Normal::All,
            Some(NormalizerWrapper::NFC(_)) => Normal::Ascii,
            Some(_) => Normal::None,
        };
        let added = Added::of(tokenizer, normal);
        Some(Self { added, cuts, normal, letters: byte_letters() })
    }

    fn encode(&self, tokenizer: &Tokenizer, text: &str) -> tokenizers::Result<Vec<TokenId>> {
        let mut encoding = Encoding {
            tokenizer,
            words: self,
            ids: Vec::with_capacity(text.len() / 3),
            letters: String::new(),
        };
        let is_normal = match self.normal {
            Normal::All => true,
            Normal::Ascii => text.is_ascii(),
            Normal::None => false,
        };
        match &self.added {
            Some(added) if is_normal => encoding.text(text, added)?,
            Some(_) | None => encoding.any_text(text, is_normal)?,
        }
        Ok(encoding.ids)
    }
}

/// Tokens beside the model's vocabulary, which are found in a text before it is cut.
#[derive(Debug)]
struct Added {
    search: AhoCorasick,
    ids: Vec<TokenId>,
}

impl Added {
    /// Those that are looked for first, and those that are looked for in what lies between them.
    /// `None` where more is asked for than that the token stands there.
    fn of(tokenizer: &Tokenizer, normal: Normal) -> Option<Vec<Self>> {
        let vocabulary = tokenizer.get_added_vocabulary();
        let mut tokens: Vec<_> = vocabulary.get_added_tokens_decoder().iter().collect();
        tokens.sort_unstable_by_key(|(id, _)| **id);
        let is_plain = |token: &AddedToken| {
            let is_normal = !token.normalized || normal == Normal::All || token.content.is_ascii();
            is_normal
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

/// One expression that words are cut by.
#[derive(Debug)]
enum Cut {
    /// What an automaton can do by itself.
    Automaton(Regex),
    Library(Box<Split>),
}

/// How the expressions of most families end: the last of several blanks goes to the word after them.
/// Looking ahead is all that no automaton can do.
const BLANKS: &str = r"|\s+(?!\S)|\s+";
/// The place of `\s+` among an automaton's expressions.
const BLANKS_ID: usize = 1;

impl Cut {
    fn of(split: Split) -> Self {
        let automaton = match &split.pattern {
            SplitPattern::Regex(pattern) => match pattern.strip_suffix(BLANKS) {
                Some(words) => Regex::new_many(&[words, r"\s+"]).ok(),
                None => Regex::new(pattern).ok(),
            },
            SplitPattern::String(_) => None,
        };
        automaton.map_or_else(|| Self::Library(Box::new(split)), Self::Automaton)
    }

    /// Hands each match in `text` to `take`, in order.
    fn each(
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
        let mut at = 0;
        while at < text.len() {
            let input = Input::new(text).range(at..);
            // Nearly always a word begins where the last one ended: then there is nothing to search.
            let here = regex.search(&input.clone().anchored(Anchored::Yes));
            let Some(found) = here.or_else(|| regex.search(&input)) else { break };
            let mut end = found.end();
            if found.pattern().as_usize() == BLANKS_ID && end < text.len() {
                let blanks = text.get(found.range()).unwrap_or_default();
                let last = blanks.chars().next_back().map_or(0, char::len_utf8);
                if last < blanks.len() {
                    end -= last;
                }
            }
            let is_nothing = end == found.start();
            take(found.start()..end)?;
            // Behind a match of nothing the next one begins a character later.
            let next = text.get(end..).and_then(|rest| rest.chars().next()).filter(|_| is_nothing);
            at = end + next.map_or(usize::from(is_nothing), char::len_utf8);
        }
        Ok(())
    }
}

/// One text on its way to tokens.
struct Encoding<'a> {
    tokenizer: &'a Tokenizer,
    words: &'a Words,
    ids: Vec<TokenId>,
    letters: String,
}

impl Encoding<'_> {
    /// A normal text; `added` is still to be looked for.
    fn text(&mut self, text: &str, added: &[Added]) -> tokenizers::Result<()> {
        let Some((first, rest)) = added.split_first() else {
            return self.piece(text, &self.words.cuts);
        };
        let mut done = 0;
        for found in first.search.find_iter(text) {
            self.text(text.get(done..found.start()).unwrap_or_default(), rest)?;
            self.ids.extend(first.ids.get(found.pattern().as_usize()));
            done = found.end();
        }
        self.text(text.get(done..).unwrap_or_default(), rest)
    }

    /// Any text: the library makes it normal and finds the added tokens.
    fn any_text(&mut self, text: &str, is_normal: bool) -> tokenizers::Result<()> {
        let normalizer = if is_normal { None } else { self.tokenizer.get_normalizer() };
        let pieces = self.tokenizer.get_added_vocabulary().extract_and_normalize(normalizer, text);
        for (piece, _, added) in pieces.get_splits(OffsetReferential::Normalized, OffsetType::None)
        {
            match added {
                Some(added) => self.ids.extend(added.iter().map(|token| token.id)),
                None => self.piece(piece, &self.words.cuts)?,
            }
        }
        Ok(())
    }

    /// What lies between added tokens; `cuts` are still to be made.
    fn piece(&mut self, text: &str, cuts: &[Cut]) -> tokenizers::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let Some((first, rest)) = cuts.split_first() else { return self.word(text) };
        let mut done = 0;
        first.each(text, |found| {
            self.piece(text.get(done..found.start).unwrap_or_default(), rest)?;
            done = found.end;
            self.piece(text.get(found).unwrap_or_default(), rest)
        })?;
        self.piece(text.get(done..).unwrap_or_default(), rest)
    }

    fn word(&mut self, word: &str) -> tokenizers::Result<()> {
        let letters = &self.words.letters;
        self.letters.clear();
        self.letters.extend(word.bytes().filter_map(|byte| letters.get(usize::from(byte))));
        let tokens = self.tokenizer.get_model().tokenize(&self.letters)?;
        self.ids.extend(tokens.iter().map(|token| token.id));
        Ok(())
    }
}

/// The bytes of each token of a byte-level tokenizer.
#[derive(Debug)]
struct TokenBytes {
    bytes: Vec<u8>,
    /// By id: where its bytes end. They begin where those of the id before it end; of an id that is
    /// none there are none.
    ends: Vec<usize>,
}

impl TokenBytes {
    /// `None` where tokens become text in another way.
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let Some(DecoderWrapper::ByteLevel(_)) = tokenizer.get_decoder() else { return None };
        let bytes_of: HashMap<char, u8> = byte_letters().into_iter().zip(0..=u8::MAX).collect();
        let last = tokenizer.get_vocab(true).into_values().max()?;
        // Ids far apart would make a table of nothing.
        if last as usize > 2 * tokenizer.get_vocab_size(true) {
            return None;
        }
        let mut table = Self { bytes: Vec::new(), ends: Vec::new() };
        for id in 0..=last {
            let token = tokenizer.id_to_token(id).unwrap_or_default();
            let bytes: Option<Vec<u8>> =
                token.chars().map(|letter| bytes_of.get(&letter).copied()).collect();
            // A token that was added may be written as it is.
            table.bytes.extend(bytes.unwrap_or_else(|| token.into_bytes()));
            table.ends.push(table.bytes.len());
        }
        Some(table)
    }

    fn text(&self, ids: &[TokenId]) -> String {
        let mut bytes = Vec::with_capacity(4 * ids.len());
        for &id in ids {
            let id = id as usize;
            let begin = id.checked_sub(1).and_then(|before| self.ends.get(before));
            let end = self.ends.get(id).copied().unwrap_or(0);
            let of_id = self.bytes.get(begin.copied().unwrap_or(0)..end);
            bytes.extend_from_slice(of_id.unwrap_or_default());
        }
        String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}

/// The letter that stands for each byte in the tokens of byte-level tokenizers: itself where it can
/// be seen, else one beyond those.
fn byte_letters() -> [char; 256] {
    let mut beyond = (0x100..).filter_map(char::from_u32);
    std::array::from_fn(|byte| match u8::try_from(byte) {
        Ok(byte @ (b'!'..=b'~' | 0xA1..=0xAC | 0xAE..)) => char::from(byte),
        _ => beyond.next().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests;
