//! vLLM's routed experts: the decoder agrees with the naive one on every input, in bounded memory.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change, Model, Sent};
use orchestrate_fuzz::naive;
use orchestrate_routing::{WireForm, decode};

#[derive(Debug, Arbitrary)]
struct Input {
    model: Model,
    sent: Sent,
    descr: u8,
    version: u8,
    header: Vec<Change>,
    text: Vec<Change>,
}

fuzz_target!(|input: Input| {
    let shape = input.model.shape();
    let (start, tokens) = (input.sent.start(), input.sent.tokens());
    let (descr, width) = match input.descr % 8 {
        0 => ("<u2", 2),
        1 => ("<i2", 2),
        2 => ("<i4", 4),
        3 => (">u2", 2),
        _ if shape.experts > 256 => ("<u2", 2),
        _ => ("|u1", 1),
    };
    let ids = input.sent.wire_ids(&shape);
    let mut header = format!(
        "{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}, {}, {}), }}",
        input.sent.sent_rows(),
        shape.hidden_layers,
        shape.top_k
    )
    .into_bytes();
    input::change(&mut header, &input.header);
    let padded = (header.len() + 11).next_multiple_of(64) - 10;
    header.resize(padded - 1, b' ');
    header.push(b'\n');
    let mut file = b"\x93NUMPY".to_vec();
    if input.version % 8 == 7 {
        file.extend([2, 0]);
        file.extend((header.len() as u32).to_le_bytes());
    } else {
        file.extend([1, 0]);
        file.extend((header.len() as u16).to_le_bytes());
    }
    file.extend(header);
    file.extend(ids.iter().flat_map(|id| id.to_le_bytes().into_iter().take(width)));
    let mut text = input::base64(&file);
    input::change(&mut text, &input.text);

    let found = bounded(text.len(), || decode(WireForm::VllmNpy, &text, &shape, start, tokens));
    let plain = naive::base64(&text).filter(|_| naive::usable(&shape)).and_then(|bytes| {
        let (at, ids, [rows, layers, top_k]) = naive::npy_header(&bytes)?;
        let length = rows.checked_mul(layers)?.checked_mul(top_k)?.checked_mul(ids.bytes)?;
        if (layers, top_k) != (shape.hidden_layers, shape.top_k)
            || at.checked_add(length) != Some(bytes.len())
        {
            return None;
        }
        naive::rows(&bytes, at, rows, ids, &shape, (start, tokens))
    });
    // The naive header parser is lenient. Acceptance is required only for headers as NumPy writes
    // them, and for one-byte ids only if they can name every expert.
    let complete = input.header.is_empty()
        && input.text.is_empty()
        && (width > 1 || shape.experts <= 256)
        && descr != ">u2";
    naive::compare(&found, plain.as_ref(), &shape, start, complete);
});
