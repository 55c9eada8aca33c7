//! SGLang's routed experts: the decoder agrees with the naive one on every input, in bounded
//! memory.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change, Model, Sent};
use orchestrate_fuzz::naive::{self, Ids};
use orchestrate_routing::{WireForm, decode};

#[derive(Debug, Arbitrary)]
struct Input {
    model: Model,
    sent: Sent,
    text: Vec<Change>,
}

fuzz_target!(|input: Input| {
    let shape = input.model.shape();
    let (start, tokens) = (input.sent.start(), input.sent.tokens());
    let raw: Vec<u8> = input.sent.wire_ids(&shape).iter().flat_map(|id| id.to_le_bytes()).collect();
    let mut text = input::base64(&raw);
    input::change(&mut text, &input.text);

    let found = bounded(text.len(), || decode(WireForm::SglangI32, &text, &shape, start, tokens));
    let row = shape.hidden_layers * shape.top_k * 4;
    let plain = naive::base64(&text)
        .filter(|bytes| naive::usable(&shape) && bytes.len() % row == 0)
        .and_then(|bytes| {
            let ids = Ids { bytes: 4, signed: true };
            naive::rows(&bytes, 0, bytes.len() / row, ids, &shape, (start, tokens))
        });
    naive::compare(&found, plain.as_ref(), &shape, start, true);
});
