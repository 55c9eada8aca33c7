//! Bodies of `/generate` as the embedded engine receives them: each is checked or refused, in memory
//! bounded by its size and by what it may ask for.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_moe::infer::fuzzing::check_body;

const SEEDS: [&str; 4] = [
    r#"{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "stop_token_ids": [7], "n": 2, "sampling_seed": 7}, "rid": "r", "return_logprob": true, "logprob_start_len": -1}"#,
    r#"{"input_ids": [[1], [2, 3]], "sampling_params": [{"max_new_tokens": null}, {"min_p": 0.1}], "rid": ["a", "b"]}"#,
    r#"{"input_ids": [1], "return_routed_experts": true, "routed_experts_start_len": 0, "stream": true, "extra_key": "k", "priority": 3, "sampling_params": {"stop": ["é", "x"]}}"#,
    r#"{"text": "a", "sampling_params": {"sampling_seed": 170141183460469231731687303715884105727}}"#,
];
const VOCAB: usize = 10;
const CONTEXT: usize = 64;

#[derive(Debug, Arbitrary)]
struct Input {
    seed: u8,
    changes: Vec<Change>,
}

fuzz_target!(|input: Input| {
    let mut body = SEEDS[usize::from(input.seed) % SEEDS.len()].as_bytes().to_vec();
    input::change(&mut body, &input.changes);
    // 1,024 samples of a prompt are allowed, and each has its own copy of the prompt.
    let cap = 2048 * (CONTEXT * 8 + 1024) + 64 * body.len();
    if let Some(prompts) = bounded(cap, || check_body(&body, VOCAB, CONTEXT)) {
        assert!(!prompts.is_empty());
        for (ids, budget) in prompts {
            assert!(!ids.is_empty() && ids.iter().all(|&id| (id as usize) < VOCAB));
            assert!(ids.len() + budget <= CONTEXT);
        }
    }
});
