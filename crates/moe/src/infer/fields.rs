//! Fields of `/generate` bodies, read with limits on their number while they are parsed: a small body
//! must not become a large value in memory.

use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;

/// Maximum number of prompts of a request.
pub(super) const MAX_PROMPTS: usize = 1024;
/// Maximum number of token ids of a request.
pub(super) const MAX_IDS: usize = 1 << 20;
/// Maximum number of stop strings.
pub(super) const MAX_STOPS: usize = 32;
/// Maximum number of stop token ids.
pub(super) const MAX_STOP_IDS: usize = 256;
/// Maximum size of a stop string, in bytes.
pub(super) const MAX_STOP_BYTES: usize = 256;
/// Maximum size of a request id, a cache salt and an extra key, in bytes.
pub(super) const MAX_NAME_BYTES: usize = 512;

/// One value or a list of at most `MAX`. The list is remembered: its reply is a list, too.
#[derive(Debug)]
pub(super) struct OneOrMany<T, const MAX: usize> {
    pub(super) values: Vec<T>,
    pub(super) is_list: bool,
}

impl<'de, T: FromOne<'de>, const MAX: usize> Deserialize<'de> for OneOrMany<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(OneOrManyVisitor(std::marker::PhantomData))
    }
}

/// What a [`OneOrMany`] may hold: strings and objects.
pub(super) trait FromOne<'de>: Deserialize<'de> {
    /// What it is, for error messages.
    const KIND: &'static str;

    /// The value of a string.
    fn from_text<E: Error>(text: &str) -> Result<Self, E> {
        Err(E::invalid_type(serde::de::Unexpected::Str(text), &Self::KIND))
    }

    /// The value of an object.
    fn from_object<A: MapAccess<'de>>(_: A) -> Result<Self, A::Error> {
        Err(A::Error::invalid_type(serde::de::Unexpected::Map, &Self::KIND))
    }
}

impl FromOne<'_> for String {
    const KIND: &'static str = "a string";

    fn from_text<E: Error>(text: &str) -> Result<Self, E> {
        Ok(text.to_owned())
    }
}

struct OneOrManyVisitor<T, const MAX: usize>(std::marker::PhantomData<T>);

impl<'de, T: FromOne<'de>, const MAX: usize> Visitor<'de> for OneOrManyVisitor<T, MAX> {
    type Value = OneOrMany<T, MAX>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, or a list of at most {MAX}", T::KIND)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(OneOrMany { values: vec![T::from_text(text)?], is_list: false })
    }

    fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<Self::Value, A::Error> {
        Ok(OneOrMany { values: vec![T::from_object(object)?], is_list: false })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
        Ok(OneOrMany { values: capped(list, MAX)?, is_list: true })
    }
}

/// The elements of a list of at most `max`.
fn capped<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(
    mut list: A,
    max: usize,
) -> Result<Vec<T>, A::Error> {
    let mut values = Vec::new();
    while let Some(value) = list.next_element()? {
        if values.len() == max {
            return Err(A::Error::custom(format_args!("a list must have at most {max} elements")));
        }
        values.push(value);
    }
    Ok(values)
}

/// A list of at most `MAX` values.
#[derive(Debug, Default)]
pub(super) struct Capped<T, const MAX: usize>(pub(super) Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Capped<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct List<T, const MAX: usize>(std::marker::PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for List<T, MAX> {
            type Value = Capped<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX}")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
                capped(list, MAX).map(Capped)
            }
        }

        from.deserialize_seq(List(std::marker::PhantomData))
    }
}

/// Whether a value other than null and false was given. The value itself is not kept.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Given(pub(super) bool);

impl<'de> Deserialize<'de> for Given {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Given;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }

            fn visit_unit<E>(self) -> Result<Given, E> {
                Ok(Given(false))
            }

            fn visit_bool<E>(self, value: bool) -> Result<Given, E> {
                Ok(Given(value))
            }

            fn visit_i64<E>(self, _: i64) -> Result<Given, E> {
                Ok(Given(true))
            }

            fn visit_u64<E>(self, _: u64) -> Result<Given, E> {
                Ok(Given(true))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Given, E> {
                Ok(Given(true))
            }

            fn visit_str<E>(self, _: &str) -> Result<Given, E> {
                Ok(Given(true))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Given, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Given(true))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Given, A::Error> {
                while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Given(true))
            }
        }

        from.deserialize_any(Any)
    }
}

/// One prompt, or a list of prompts, as token ids.
#[derive(Debug, Default)]
pub(super) struct Ids {
    pub(super) lists: Vec<Vec<u32>>,
    pub(super) is_list: bool,
    /// An id that is not a 32-bit number, if there is one; it stands as 0 in its list.
    pub(super) invalid: Option<i64>,
}

const IDS: &str = "input_ids must be a list of token ids, or a list of such lists";

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(IdsVisitor)
    }
}

struct IdsVisitor;

impl<'de> Visitor<'de> for IdsVisitor {
    type Value = Ids;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(IDS)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Ids, A::Error> {
        let mut ids = Ids::default();
        let (mut single, mut count) = (Vec::new(), 0);
        while let Some(is_list) = list.next_element_seed(Element {
            single: &mut single,
            ids: &mut ids,
            count: &mut count,
        })? {
            if is_list == single.is_empty() {
                continue;
            }
            return Err(A::Error::custom(IDS));
        }
        ids.is_list = !ids.lists.is_empty();
        if ids.is_list && !single.is_empty() {
            return Err(A::Error::custom(IDS));
        }
        if !ids.is_list {
            ids.lists.push(single);
        }
        Ok(ids)
    }
}

/// Reads one element of `input_ids`: an id or a list of ids. The value says whether it was a list.
struct Element<'a> {
    single: &'a mut Vec<u32>,
    ids: &'a mut Ids,
    count: &'a mut usize,
}

impl Element<'_> {
    /// The id as it is stored, if it may be: requests have a bounded number.
    fn id<E: Error>(ids: &mut Ids, count: &mut usize, id: i64) -> Result<u32, E> {
        *count += 1;
        if *count > MAX_IDS {
            return Err(E::custom(format_args!("input_ids may have at most {MAX_IDS} token ids")));
        }
        let narrow = u32::try_from(id);
        if narrow.is_err() {
            ids.invalid.get_or_insert(id);
        }
        Ok(narrow.unwrap_or(0))
    }

    fn push<E: Error>(self, id: i64) -> Result<bool, E> {
        let id = Self::id(self.ids, self.count, id)?;
        self.single.push(id);
        Ok(false)
    }
}

impl<'de> DeserializeSeed<'de> for Element<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<bool, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Element<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(IDS)
    }

    fn visit_i64<E: Error>(self, id: i64) -> Result<bool, E> {
        self.push(id)
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<bool, E> {
        self.push(i64::try_from(id).unwrap_or(i64::MAX))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<bool, A::Error> {
        let Self { ids, count, .. } = self;
        if ids.lists.len() == MAX_PROMPTS {
            let text = format_args!("a request may have at most {MAX_PROMPTS} prompts");
            return Err(A::Error::custom(text));
        }
        let mut prompt = Vec::new();
        while let Some(id) = list.next_element::<i64>()? {
            prompt.push(Self::id(ids, count, id)?);
        }
        ids.lists.push(prompt);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(text: &str) -> Result<Ids, String> {
        serde_json::from_str(text).map_err(|e| e.to_string())
    }

    #[test]
    fn ids_are_one_list_or_lists() {
        let one = ids("[1, 2, 3]").unwrap();
        assert_eq!((one.lists, one.is_list, one.invalid), (vec![vec![1, 2, 3]], false, None));
        let two = ids("[[1], [2, 3]]").unwrap();
        assert_eq!((two.lists, two.is_list), (vec![vec![1], vec![2, 3]], true));
        assert_eq!(ids("[]").unwrap().lists, [[0_u32; 0]]);
        assert_eq!(ids("[[], [1]]").unwrap().lists.len(), 2);
        assert_eq!(ids("[1, -7, 99999999999]").unwrap().invalid, Some(-7));
        for mixed in ["[1, [2]]", "[[1], 2]", "[\"a\"]", "{}", "7", "[[[1]]]", "[1.5]"] {
            assert!(ids(mixed).is_err(), "{mixed}");
        }
        assert!(ids("[1, [2]]").unwrap_err().contains("list of such lists"));
    }

    #[test]
    fn numbers_of_values_are_bounded_while_they_are_read() {
        let many = format!("[{}[1]]", "[1],".repeat(MAX_PROMPTS));
        assert!(ids(&many).unwrap_err().contains("at most 1024 prompts"));
        let long = format!("[{}1]", "1,".repeat(MAX_IDS));
        assert!(ids(&long).unwrap_err().contains("token ids"));
        let stops = |text: &str| serde_json::from_str::<OneOrMany<String, 2>>(text);
        assert_eq!(stops("\"a\"").unwrap().values, ["a"]);
        assert!(stops("[\"a\", \"b\"]").is_ok() && stops("[\"a\", \"b\", \"c\"]").is_err());
        assert!(serde_json::from_str::<Capped<i64, 1>>("[1, 2]").is_err());
    }

    #[test]
    fn given_means_neither_null_nor_false() {
        for (text, given) in
            [("null", false), ("false", false), ("true", true), ("[1]", true), ("{\"a\":1}", true)]
        {
            assert_eq!(serde_json::from_str::<Given>(text).unwrap().0, given, "{text}");
        }
    }
}
