use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::LazyLock;

/// A tokenizer with all bytes and a few merged words, and with these first steps.
fn tokenizer(normalizer: &Value, pre_tokenizer: &Value) -> Tokenizer {
    tokenizer_with("é漢", normalizer, pre_tokenizer)
}

/// The same with another added token, which is searched in normalized text.
fn tokenizer_with(token: &str, normalizer: &Value, pre_tokenizer: &Value) -> Tokenizer {
    let chars = byte_chars().map(String::from);
    let merged = ["re", "ret", "in", "  ", "    ", "12", "é", "漢", "'s", "\n\n", "x+"];
    let mut vocab: Vec<String> = chars.to_vec();
    let mut merges = Vec::new();
    for word in merged {
        let word: Vec<&str> = word.bytes().map(|byte| chars[usize::from(byte)].as_str()).collect();
        for end in 2..=word.len() {
            let (head, last) = (word[..end - 1].concat(), word[end - 1]);
            if !vocab.contains(&format!("{head}{last}")) {
                vocab.push(format!("{head}{last}"));
                merges.push(format!("{head} {last}"));
            }
        }
    }
    let first_added = vocab.len();
    let vocab: serde_json::Map<String, Value> =
        vocab.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    let added = |index: usize, content: &str, normalized: bool| {
        json!({"id": first_added + index, "content": content, "normalized": normalized,
               "special": !normalized, "single_word": false, "lstrip": false, "rstrip": false})
    };
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "post_processor": null,
        "added_tokens": [added(0, "<|im_start|>", false), added(1, "<think>", true),
                         added(5, token, true)],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
                    "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    });
    Tokenizer::from_bytes(file.to_string()).unwrap()
}

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
           "use_regex": use_regex})
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
           "invert": false})
}

fn sequence(steps: &[Value]) -> Value {
    json!({"type": "Sequence", "pretokenizers": steps})
}

/// Tokenizers as the models of these families have them.
static FAMILIES: LazyLock<Vec<(&'static str, Codec)>> = LazyLock::new(|| {
    let nfc = json!({"type": "NFC"});
    let nothing = json!({"type": "Sequence", "normalizers": []});
    let qwen = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let deepseek = [
        split(r"\p{N}{1,3}"),
        split(r"[一-龥぀-ゟ゠-ヿ]+"),
        split(
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ),
        byte_level(false),
    ];
    let gpt_oss = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let split_by_text = json!({"type": "Split", "pattern": {"String": "re"},
                                 "behavior": "Isolated", "invert": false});
    let odd = [
        // Empty matches, and a look-behind.
        split("x*"),
        split(r"\b"),
        split("(?<=e)t+"),
        split_by_text,
        byte_level(true),
    ];
    [
        ("qwen", tokenizer_with("[x]", &nfc, &sequence(&[split(qwen), byte_level(false)]))),
        ("deepseek", tokenizer(&nothing, &sequence(&deepseek))),
        ("gpt-oss", tokenizer(&Value::Null, &sequence(&[split(gpt_oss), byte_level(false)]))),
        ("gpt-2", tokenizer(&Value::Null, &byte_level(true))),
        ("odd", tokenizer(&nfc, &sequence(&odd))),
    ]
    .map(|(name, tokenizer)| (name, Codec::new(tokenizer)))
    .into()
});

#[test]
fn model_families_are_split_by_automata() {
    for (family, codec) in &*FAMILIES {
        let encoder = codec.fast_encoder.as_ref().unwrap();
        let by_library =
            encoder.splitters.iter().filter(|s| matches!(s, Splitter::Library(_))).count();
        assert_eq!(by_library, if *family == "odd" { 2 } else { 0 }, "{family}");
        // The odd one has an added token that is not normalized.
        assert_eq!(encoder.added.is_some(), *family != "odd", "{family}");
    }
}

fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("return".to_owned()),
        Just("    ".to_owned()),
        Just("\n\n".to_owned()),
        Just("it's".to_owned()),
        Just("<|im_start|>".to_owned()),
        Just("<think>".to_owned()),
        Just("[x]".to_owned()),
        Just("é漢".to_owned()),
        Just("e\u{301}漢".to_owned()),
        Just("1234567".to_owned()),
        "[ -~]{0,12}",
        r"\s{0,4}",
        r"\PC{0,6}",
        any::<String>(),
    ];
    proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn fast_and_library_encoding_agree(text in text()) {
        for (family, codec) in &*FAMILIES {
            prop_assert!(codec.fast_encoder.is_some(), "{family}");
            let whole = codec.tokenizer.encode_fast(text.as_str(), false).unwrap();
            prop_assert_eq!(codec.encode(&text).unwrap(), whole.get_ids(), "{}", family);
        }
    }

    #[test]
    fn fast_and_library_decoding_agree(ids in proptest::collection::vec(0..320_u32, 0..40)) {
        for (family, codec) in &*FAMILIES {
            prop_assert!(codec.fast_decoder.is_some(), "{family}");
            let text = codec.tokenizer.decode(&ids, false).unwrap();
            prop_assert_eq!(codec.decode(&ids).unwrap(), text, "{}", family);
        }
    }
}

#[test]
fn sparse_ids_are_decoded_by_the_library() {
    let tokenizer = tokenizer(&Value::Null, &byte_level(true));
    let mut file: Value = serde_json::from_str(&tokenizer.to_string(false).unwrap()).unwrap();
    file["model"]["vocab"]["far"] = json!(1_000_000);
    let codec = Codec::new(Tokenizer::from_bytes(file.to_string()).unwrap());
    assert!(codec.fast_encoder.is_some() && codec.fast_decoder.is_none());
    let ids = codec.encode(PROBE).unwrap();
    assert_eq!(codec.decode(&ids).unwrap(), PROBE);
}

#[test]
fn truncation_and_padding_of_a_file_do_not_apply() {
    let whole = tokenizer(&Value::Null, &byte_level(true));
    let mut file: Value = serde_json::from_str(&whole.to_string(false).unwrap()).unwrap();
    file["truncation"] = json!({
        "max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right",
    });
    file["padding"] = json!({
        "strategy": {"Fixed": 4096}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|im_start|>",
    });
    let limited = Tokenizer::from_bytes(file.to_string()).unwrap();
    let codecs =
        [whole, Codec::read(file.to_string().as_bytes()).unwrap(), limited].map(Codec::new);
    let [whole, read, limited] = codecs.map(|codec| codec.encode(PROBE).unwrap());
    assert_eq!(read, whole);
    assert_ne!(limited, whole, "the file has limits");
}

#[test]
fn a_token_with_two_ids_and_an_id_of_two_tokens_are_refused_by_name() {
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "normalized": false, "special": true,
               "single_word": false, "lstrip": false, "rstrip": false})
    };
    let read = |vocabulary: &str, added: &[Value]| {
        let model = json!({"type": "BPE", "vocab": {}, "merges": []});
        let file = json!({"version": "1.0", "added_tokens": added, "model": model});
        let file = file.to_string().replace(r#""vocab":{}"#, &format!(r#""vocab":{vocabulary}"#));
        Codec::read(file.as_bytes()).map_err(|error| error.to_string())
    };
    let vocabulary = r#"{"a":0,"b":1}"#;
    for added in [
        &[][..],
        &[added(2, "<x>"), added(3, "<y>")],
        &[added(0, "a"), added(1, "b"), added(2, "<x>")],
        &[added(2, "<x>"), added(2, "<x>")],
    ] {
        let tokenizer = read(vocabulary, added).unwrap();
        for token in added {
            let content = token["content"].as_str().unwrap();
            assert_eq!(tokenizer.token_to_id(content).map(Value::from), Some(token["id"].clone()));
        }
    }
    for (vocabulary, added, problem) in [
        (
            vocabulary,
            vec![added(2, "<x>"), added(2, "<y>")],
            r#"the added token "<y>" has the id 2, which "<x>" has, too"#,
        ),
        (
            vocabulary,
            vec![added(2, "<x>"), added(3, "<x>")],
            r#"the added token "<x>" has the ids 2 and 3"#,
        ),
        (vocabulary, vec![added(1, "<x>")], r#"the added token "<x>" has the id 1, which "b" has"#),
        (
            vocabulary,
            vec![added(2, "a")],
            r#"the added token "a" has the id 2, but would be read with the id 0"#,
        ),
        (
            vocabulary,
            vec![added(2, "<x>"), added(7, "<y>")],
            r#"the added token "<y>" has the id 7, but would be read with the id 3"#,
        ),
        (r#"{"a":0,"b":1,"a":2}"#, vec![], r#"the vocabulary has "a" twice, with the ids 0 and 2"#),
        (r#"{"a":0,"b":0}"#, vec![], r#"the vocabulary has the id 0 twice, for "a" and "b""#),
    ] {
        let error = read(vocabulary, &added).unwrap_err();
        assert!(error.starts_with(problem), "{error}");
        assert!(error.ends_with("use the model's original tokenizer.json"), "{error}");
    }
}

#[test]
fn other_tokenizers_are_encoded_by_the_library() {
    let prefixed = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false,
                          "use_regex": true});
    let removing = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "Removed",
                          "invert": false});
    let others = [
        prefixed,
        sequence(&[removing, byte_level(false)]),
        sequence(&[byte_level(false), split(" ")]),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
               "split": true}),
    ];
    for other in others {
        let codec = Codec::new(tokenizer(&Value::Null, &other));
        assert!(codec.fast_encoder.is_none(), "{other}");
        let whole = codec.tokenizer.encode_fast(PROBE, false).unwrap();
        assert_eq!(codec.encode(PROBE).unwrap(), whole.get_ids());
    }
}
