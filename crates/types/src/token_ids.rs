//! Checks that a tokenizer's file says which id each token has.
//!
//! The library takes the last of several entries for one token, gives an added token whose id does not follow
//! from the vocabulary another id, and only warns. Prompts would have ids that the model was not trained with.

use crate::TokenId;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

/// What to do about all of these problems.
const REMEDY: &str = "use the model's original tokenizer.json";

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    model: Model,
}

#[derive(Deserialize)]
struct AddedToken {
    id: TokenId,
    content: String,
}

#[derive(Default, Deserialize)]
struct Model {
    #[serde(default)]
    vocab: Vocabulary,
}

/// Tokens by id. Empty for a vocabulary that is a list, in which the place of a token is its id.
#[derive(Default)]
struct Vocabulary(HashMap<TokenId, String>);

impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tokens;
        impl<'de> Visitor<'de> for Tokens {
            type Value = Vocabulary;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a vocabulary")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Vocabulary, A::Error> {
                let mut tokens = HashMap::new();
                let mut ids = HashMap::new();
                while let Some((token, id)) = entries.next_entry::<String, TokenId>()? {
                    if let Some(other) = ids.insert(token.clone(), id) {
                        let problem = format!(
                            "the vocabulary has {token:?} twice, with the ids {other} and {id}"
                        );
                        return Err(A::Error::custom(problem));
                    }
                    match tokens.entry(id) {
                        Entry::Vacant(free) => {
                            free.insert(token);
                        }
                        Entry::Occupied(other) => {
                            let other = other.get();
                            let problem = format!(
                                "the vocabulary has the id {id} twice, for {other:?} and {token:?}"
                            );
                            return Err(A::Error::custom(problem));
                        }
                    }
                }
                Ok(Vocabulary(tokens))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vocabulary, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Vocabulary::default())
            }
        }
        deserializer.deserialize_any(Tokens)
    }
}

/// Checks that a `tokenizer.json` gives each token one id and each id one token, and that the tokenizer which was
/// read from it has the same ids: `loaded` is its id of a token.
///
/// # Errors
/// The tokens and ids that disagree, and what to do.
pub fn check_token_ids(
    file: &[u8],
    loaded: impl Fn(&str) -> Option<TokenId>,
) -> Result<(), String> {
    let wrong = |problem: String| Err(format!("{problem}; {REMEDY}"));
    let File { added_tokens, model: Model { vocab: Vocabulary(vocabulary) } } =
        serde_json::from_slice(file).map_err(|error| format!("{error}; {REMEDY}"))?;
    let mut by_id: HashMap<TokenId, &str> = HashMap::new();
    let mut by_content: HashMap<&str, TokenId> = HashMap::new();
    for AddedToken { id, content } in &added_tokens {
        let same_id = by_id.insert(*id, content).or(vocabulary.get(id).map(String::as_str));
        if let Some(other) = same_id.filter(|other| other != content) {
            return wrong(format!(
                "the added token {content:?} has the id {id}, which {other:?} has, too"
            ));
        }
        if let Some(other) = by_content.insert(content, *id).filter(|other| other != id) {
            return wrong(format!("the added token {content:?} has the ids {other} and {id}"));
        }
        // The library leaves out tokens without a text.
        if let Some(loaded) = loaded(content).filter(|loaded| loaded != id) {
            return wrong(format!(
                "the added token {content:?} has the id {id}, but would be read with the id {loaded}, which follows \
                 from the vocabulary and the added tokens before it"
            ));
        }
    }
    Ok(())
}
