//! All pairs of algorithm options: either they work together, or the refusal names one of them
//! and says what it must be.
#![expect(clippy::unwrap_used, reason = "test helpers")]

use orchestrate_handoff::protocol::{
    Hyperparameters, ImportanceCorrection, PolicyLoss, RoutingReplay,
};
use orchestrate_handoff::rules::refusals;
use orchestrate_handoff::{AlgorithmSection, AlgorithmSettings, LossSettings};
use orchestrate_settings::SectionKeys as _;
use orchestrate_types::Found;
use serde_json::{Map, Value, json};

/// Options that can be combined, with their values.
fn options() -> Vec<(&'static str, Vec<Value>)> {
    let losses = PolicyLoss::ALL.map(PolicyLoss::name);
    let corrections = ["none", "tis", "mis", "icepop", "geometric_mask"];
    let sums = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-norm"];
    let texts = |texts: &[&str]| texts.iter().map(|text| json!(text)).collect::<Vec<_>>();
    vec![
        ("policy_loss", texts(&losses)),
        ("aggregation", texts(&sums)),
        ("dual_clip", vec![json!(0.0), json!(3.0)]),
        ("router_shift", texts(&["none", "before_clip", "after_clip"])),
        ("importance_correction", texts(&corrections)),
        ("importance_level", texts(&["token", "sequence"])),
        ("off_policy_delta", vec![json!(0.0), json!(0.1)]),
        ("kl_estimator", texts(&["k1", "k2", "k3", "k3_plus"])),
        ("kl_unbiased", vec![json!(false), json!(true)]),
        ("routing_replay", texts(&["none", "recompute", "rollout", "predictive"])),
        ("mini_steps", vec![json!(1), json!(4)]),
        ("advantage_normalisation", texts(&["std", "population_std", "none", "rloo"])),
        ("branch_weight", texts(&["full", "shared"])),
        ("warmup_steps", vec![json!(0), json!(20)]),
        ("truncated", texts(&["train", "mask"])),
        ("overlong_max_tokens", vec![json!(100)]),
    ]
}

fn set(section: &mut Map<String, Value>, key: &str, value: &Value) {
    section.insert(key.to_owned(), value.clone());
    // What a value requires, unless another option may contradict it.
    let also: &[(&str, Value)] = match (key, value.as_str()) {
        ("aggregation", Some("token-sum-norm")) => &[("loss_norm_tokens", json!(100.0))],
        ("kl_estimator" | "kl_unbiased", _) => &[("kl_coefficient", json!(0.1))],
        ("overlong_max_tokens", _) => &[("overlong_cache_tokens", json!(20))],
        _ => &[],
    };
    for (key, value) in also {
        section.insert((*key).to_owned(), value.clone());
    }
}

fn check(section: &Map<String, Value>) -> Result<AlgorithmSettings, Vec<(String, String)>> {
    let section: AlgorithmSection = serde_json::from_value(section.clone().into()).unwrap();
    let checked = section.check();
    checked.map_err(|found| found.into_iter().map(|p| (p.key, p.remedy)).collect())
}

/// Combinations that the papers rule out, written independently of the rules under test.
fn is_contradiction(section: &Map<String, Value>) -> bool {
    let given = |key: &str| section.get(key);
    let is = |key: &str, default: &str, one_of: &[&str]| {
        one_of.contains(&given(key).and_then(Value::as_str).unwrap_or(default))
    };
    let number = |key: &str| given(key).and_then(Value::as_f64).unwrap_or(0.0);
    let loss = |one_of: &[&str]| is("policy_loss", "grpo", one_of);
    let corrects = !is("importance_correction", "none", &["none"]);
    let shifts = is("router_shift", "none", &["before_clip", "after_clip"]);
    [
        // Defined as a mean over sequences.
        given("aggregation").is_some()
            && !is("aggregation", "", &["seq-mean-token-mean"])
            && loss(&["gspo", "gmpo", "rspo"]),
        number("dual_clip") > 0.0 && !loss(&["grpo", "ppo"]),
        // Rspo is gmpo with router shift, and only its first form has the weight after the clip.
        loss(&["rspo"]) && is("router_shift", "before_clip", &["none"]),
        shifts && loss(&["gmpo", "cispo", "minirl", "sapo"]),
        is("router_shift", "", &["after_clip"]) && !loss(&["rspo"]),
        // A level without a correction, or not the correction's own.
        is("importance_level", "token", &["sequence"]) && !corrects,
        is("importance_correction", "", &["icepop"])
            && is("importance_level", "token", &["sequence"]),
        is("importance_correction", "", &["geometric_mask"])
            && is("importance_level", "sequence", &["token"]),
        is("importance_correction", "", &["icepop"]) && loss(&["gmpo", "rspo"]),
        corrects && loss(&["minirl"]),
        number("off_policy_delta") > 0.0 && loss(&["ppo"]),
        is("kl_estimator", "k3", &["k1"]) && !loss(&["ppo"]),
        given("kl_unbiased") == Some(&json!(true)) && !is("kl_estimator", "k3", &["k3"]),
        is("routing_replay", "", &["predictive"]) && number("mini_steps") < 2.0,
        !is("advantage_normalisation", "std", &["std"]) && loss(&["ppo"]),
        is("branch_weight", "full", &["shared"]) && loss(&["ppo"]),
    ]
    .contains(&true)
}

#[test]
fn every_pair_of_options_works_or_is_refused_by_name() {
    let options = options();
    let (mut worked, mut refused) = (0, 0);
    for (i, (a, a_values)) in options.iter().enumerate() {
        for (b, b_values) in options.iter().skip(i + 1) {
            for (va, vb) in a_values.iter().flat_map(|va| b_values.iter().map(move |vb| (va, vb))) {
                let mut section = Map::new();
                set(&mut section, a, va);
                set(&mut section, b, vb);
                let contradicts = is_contradiction(&section);
                assert_eq!(check(&section).is_err(), contradicts, "{a}={va} {b}={vb}");
                match check(&section) {
                    Ok(algorithm) => {
                        // The section that is written out checks to the same settings.
                        assert_eq!(algorithm.section().check().unwrap(), algorithm);
                        worked += 1;
                    }
                    Err(problems) => {
                        for (key, remedy) in &problems {
                            let key = key.strip_prefix("algorithm.").unwrap();
                            // A key that was left out is named together with what requires it.
                            let named = section.contains_key(key) || remedy.contains(*a);
                            let named = named || remedy.contains(*b);
                            assert!(named, "{a}={va} {b}={vb}: {problems:?}");
                            assert!(remedy.len() > 10);
                        }
                        refused += 1;
                    }
                }
            }
        }
    }
    assert!(worked > 600 && refused > 200, "{worked} worked, {refused} refused");
}

#[test]
fn keys_without_effect_and_halves_of_pairs_are_refused() {
    for (section, key) in [
        (json!({"importance_high": 3.0}), "importance_high"),
        (json!({"importance_correction": "tis", "importance_low": 0.1}), "importance_low"),
        (json!({"router_shift_floor": 0.9}), "router_shift_floor"),
        (json!({"kl_estimator": "k2"}), "kl_estimator"),
        (json!({"gae_lambda": 0.9}), "gae_lambda"),
        (json!({"predictor_rate": 10.0}), "predictor_rate"),
        (json!({"policy_loss": "sapo", "clip_high": 0.3}), "clip_high"),
        (json!({"sapo_tau": [1.0, 1.0]}), "sapo_tau"),
        (json!({"loss_norm_tokens": 100.0}), "loss_norm_tokens"),
        (json!({"overlong_max_tokens": 100}), "overlong_cache_tokens"),
        (json!({"overlong_cache_tokens": 100}), "overlong_max_tokens"),
        (
            json!({"overlong_max_tokens": 100, "overlong_cache_tokens": 101}),
            "overlong_cache_tokens",
        ),
        (json!({"importance_correction": "icepop", "importance_low": 6.0}), "importance_low"),
        // A weight at the floor alone would pass the lower clip.
        (
            json!({"policy_loss": "gspo", "router_shift": "before_clip", "clip_low": 3e-4}),
            "router_shift_floor",
        ),
        (json!({"policy_loss": "rspo", "router_shift_floor": 0.5}), "router_shift_floor"),
    ] {
        let found = check(section.as_object().unwrap()).unwrap_err();
        let keys: Vec<&str> = found.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, [format!("algorithm.{key}")], "{section}");
    }
}

#[test]
fn keys_without_effect_name_the_options_they_belong_to() {
    for (section, expected) in [
        (
            json!({"gae_lambda": 0.9}),
            "algorithm.gae_lambda = 0.9: only applies with policy_loss = \"ppo\"; remove it, or set \
             its default, 1.0",
        ),
        (
            json!({"importance_high": 3.0}),
            "algorithm.importance_high = 3.0: only applies with policy_loss = \"minirl\", or \
             importance_correction = \"tis\", \"mis\", \"icepop\" or \"geometric_mask\"; remove it, or \
             set its default, 2.0",
        ),
        (
            json!({"kl_estimator": "k2"}),
            "algorithm.kl_estimator = \"k2\": only applies with kl_coefficient above 0; remove it, or \
             set its default, \"k3\"",
        ),
        (
            json!({"policy_loss": "ppo", "advantage_normalisation": "none"}),
            "algorithm.advantage_normalisation = \"none\": does not apply with policy_loss = \
             \"ppo\", whose advantages come from its value head; remove it, or set its default, \
             \"std\"",
        ),
        // The option leaves a single value, and nothing else about the key matters.
        (
            json!({"policy_loss": "minirl", "router_shift": "before_clip", "clip_low": 0.1}),
            "algorithm.router_shift = \"before_clip\": only applies with policy_loss = \"grpo\", \
             \"gspo\", \"rspo\" or \"ppo\"; remove it, or set its default, \"none\"",
        ),
        (
            json!({"policy_loss": "gspo", "dual_clip": 0.5}),
            "algorithm.dual_clip = 0.5: only applies with policy_loss = \"grpo\" or \"ppo\"; remove \
             it, or set its default, 0.0",
        ),
    ] {
        let section: AlgorithmSection = serde_json::from_value(section).unwrap();
        let [problem] = section.check().unwrap_err().try_into().unwrap();
        assert!(matches!(problem.found, Found::Unread(_)), "{problem:?}");
        assert_eq!(problem.to_string(), expected);
    }
}

#[test]
fn every_key_is_accepted_at_its_default_with_every_option() {
    for (choice, options) in [
        ("policy_loss", PolicyLoss::ALL.map(PolicyLoss::name).as_slice()),
        ("routing_replay", &RoutingReplay::ALL.map(RoutingReplay::name)),
        ("importance_correction", &ImportanceCorrection::ALL.map(ImportanceCorrection::name)),
    ] {
        for option in options {
            let mini_steps = if *option == "predictive" { 2 } else { 1 };
            let chosen = json!({choice: option, "mini_steps": mini_steps});
            let section: AlgorithmSection = serde_json::from_value(chosen).unwrap();
            let whole = AlgorithmSection::from_values(&section.fill());
            assert_eq!(whole.check(), section.check(), "{option}");
            assert!(whole.given().len() > 30 && whole.check().is_ok(), "{option}");
        }
    }
}

#[test]
fn checked_settings_hold_only_what_applies() {
    let section = json!({"policy_loss": "sapo", "routing_replay": "none"});
    let settings = check(section.as_object().unwrap()).unwrap();
    assert_eq!(settings.loss, LossSettings::Sapo { sapo_tau: (1.0, 1.05), off_policy_delta: None });
    assert_eq!(settings.kl, None);
    let written = serde_json::to_value(settings.section()).unwrap();
    assert!(written["clip_low"].is_null() && written["dual_clip"].is_null());
}

#[test]
fn defaults_are_the_published_values_of_each_loss() {
    for (section, clip, high) in [
        (json!({}), (0.2, 0.28), 2.0),
        (json!({"policy_loss": "gspo"}), (3e-4, 4e-4), 2.0),
        (json!({"policy_loss": "rspo"}), (0.4, 0.4), 2.0),
        (json!({"policy_loss": "cispo"}), (1.0, 4.0), 2.0),
        (json!({"policy_loss": "minirl"}), (0.2, 0.27), 5.0),
        (json!({"importance_correction": "icepop"}), (0.2, 0.28), 5.0),
        (json!({"importance_correction": "geometric_mask"}), (0.2, 0.28), 1.01),
    ] {
        let h = check(section.as_object().unwrap()).unwrap().hyperparameters(1.0, false);
        assert_eq!(((h.clip_low, h.clip_high), h.importance_high), (clip, high), "{section}");
    }
}

#[test]
fn requests_of_older_versions_are_accepted() {
    let old = json!({
        "policy_loss": "grpo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": null,
        "aggregation": "token-mean", "loss_norm_tokens": 1.0, "routing_replay": "rollout",
        "mini_steps": 1, "micro_batch_tokens": 100, "learning_rate": 1e-6, "betas": [0.9, 0.999],
        "adam_eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0, "temperature": 1.0,
        "measure_no_replay": false,
    });
    let read: Hyperparameters = serde_json::from_value(old).unwrap();
    let expected = Hyperparameters {
        dual_clip: None,
        micro_batch_tokens: 100,
        weight_decay: 0.0,
        ..Hyperparameters::default()
    };
    assert_eq!(read, expected);
    assert_eq!(refusals(&read), []);
}
