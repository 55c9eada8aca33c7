//! What `/server_info` says about a server, judged for training with routing replay.

use crate::Finding;
use crate::fitness::{Release, check_version};
use serde::Deserialize;

/// The first release that honours the start of the routing rows.
const OLDEST: Release = (0, 5, 12);
/// MoE backends that hide the chosen experts and report zeros.
const BLIND_BACKENDS: [&str; 3] = ["flashinfer_trtllm", "flashinfer_mxfp4", "triton_kernel"];

/// The part of `/server_info` that matters here. All of it may be absent: old servers know less.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ServerInfo {
    /// Not in SGLang's own answer: what other servers of its dialect call themselves.
    pub(super) engine: Option<String>,
    pub(super) version: Option<String>,
    pub(super) model_path: Option<String>,
    pub(super) context_length: Option<usize>,
    pub(super) page_size: Option<usize>,
    pub(super) enable_return_routed_experts: Option<bool>,
    tp_size: Option<usize>,
    dp_size: Option<usize>,
    pp_size: Option<usize>,
    ep_size: Option<usize>,
    enable_dp_attention: Option<bool>,
    max_total_num_tokens: Option<usize>,
    enable_priority_scheduling: Option<bool>,
    schedule_low_priority_values_first: Option<bool>,
    disable_radix_cache: Option<bool>,
    enable_hierarchical_cache: Option<bool>,
    enable_lmcache: Option<bool>,
    flexkv_config_file: Option<String>,
    disaggregation_mode: Option<String>,
    moe_runner_backend: Option<String>,
    enable_eplb: Option<bool>,
    ep_num_redundant_experts: Option<usize>,
    init_expert_location: Option<String>,
    enforce_shared_experts_fusion: Option<bool>,
    allow_auto_truncate: Option<bool>,
    speculative_algorithm: Option<String>,
}

fn on(flag: Option<bool>) -> bool {
    flag.unwrap_or(false)
}

fn many(size: Option<usize>) -> bool {
    size.is_some_and(|size| size > 1)
}

impl ServerInfo {
    pub(super) fn name(&self) -> String {
        let engine = self.engine.as_deref().unwrap_or("sglang");
        format!("{engine} {}", self.version.as_deref().unwrap_or("?"))
    }

    /// Whether priorities are taken, larger first as we mean them.
    pub(super) fn takes_priorities(&self) -> bool {
        on(self.enable_priority_scheduling) && !on(self.schedule_low_priority_values_first)
    }

    /// Data-parallel ranks that a request can name.
    pub(super) fn ranks(&self) -> usize {
        self.dp_size.filter(|_| on(self.enable_dp_attention)).unwrap_or(1)
    }

    pub(super) fn facts(&self) -> Vec<(&'static str, String)> {
        let size = |size: Option<usize>| size.map(|size| size.to_string());
        let backend = self.moe_runner_backend.clone();
        [
            ("tensor parallel", size(self.tp_size)),
            ("data parallel", size(self.dp_size)),
            ("pipeline parallel", size(self.pp_size)),
            ("expert parallel", size(self.ep_size)),
            ("cache page", size(self.page_size)),
            ("cache tokens", size(self.max_total_num_tokens)),
            ("MoE backend", backend),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect()
    }

    /// Everything that is unfit or doubtful, by name, with its remedy.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        if self.engine.is_none() {
            let why = "the start of the routing rows is accepted and ignored";
            findings.extend(check_version("SGLang", self.version.as_deref(), OLDEST, why));
        }
        if !on(self.enable_return_routed_experts) {
            findings.push(Finding::refusal(
                "routing-off",
                "it does not return routed experts",
                "start it with --enable-return-routed-experts",
            ));
        }
        self.judge_cache(&mut findings);
        self.judge_parallelism(&mut findings);
        self.judge_experts(&mut findings);
        if on(self.allow_auto_truncate) {
            findings.push(Finding::refusal(
                "auto-truncate",
                "it cuts long prompts silently",
                "start it without --allow-auto-truncate",
            ));
        }
        if let Some(algorithm) = &self.speculative_algorithm {
            findings.push(Finding::warning(
                "speculative-decoding",
                format!(
                    "it speculates ({algorithm}), which returned surplus rows in some releases"
                ),
                "start it without --speculative-algorithm if routing rows are refused",
            ));
        }
        findings
    }

    fn judge_cache(&self, findings: &mut Vec<Finding>) {
        if on(self.enable_hierarchical_cache) {
            findings.push(Finding::refusal(
                "hierarchical-cache",
                "KV that HiCache loads back has the routed experts of other tokens",
                "start it without --enable-hierarchical-cache",
            ));
        }
        if on(self.enable_lmcache) || self.flexkv_config_file.is_some() {
            findings.push(Finding::refusal(
                "external-cache",
                "KV from an external cache comes without its routed experts",
                "start it without --enable-lmcache and --flexkv-config-file",
            ));
        }
        if on(self.disable_radix_cache) {
            findings.push(Finding::warning(
                "prefix-cache-off",
                "every turn prefills its whole conversation again",
                "start it without --disable-radix-cache",
            ));
        }
    }

    fn judge_parallelism(&self, findings: &mut Vec<Finding>) {
        if many(self.pp_size) {
            findings.push(Finding::refusal(
                "pipeline-parallel",
                "pipeline stages report zeros for each other's layers",
                "start it with --pp-size 1",
            ));
        }
        let mode = self.disaggregation_mode.as_deref().filter(|mode| *mode != "null");
        if let Some(mode) = mode {
            findings.push(Finding::refusal(
                "disaggregation",
                format!("as {mode} worker it holds the rows of its own half only"),
                "start it without --disaggregation-mode",
            ));
        }
        if many(self.dp_size) && !on(self.enable_dp_attention) {
            findings.push(Finding::refusal(
                "data-parallel",
                "weights cannot be updated in more than one data-parallel replica",
                "start one server per replica with --dp-size 1, or add --enable-dp-attention",
            ));
        }
    }

    fn judge_experts(&self, findings: &mut Vec<Finding>) {
        let blind = self.moe_runner_backend.as_deref();
        if let Some(backend) = blind.filter(|backend| BLIND_BACKENDS.contains(backend)) {
            findings.push(Finding::refusal(
                "moe-backend",
                format!("its MoE kernel {backend} hides the chosen experts"),
                "start it with --moe-runner-backend triton",
            ));
        }
        let moved = self.init_expert_location.as_deref().is_some_and(|word| word != "trivial");
        let redundant = self.ep_num_redundant_experts.is_some_and(|count| count > 0);
        if on(self.enable_eplb) || redundant || moved {
            findings.push(Finding::warning(
                "expert-load-balancing",
                "experts are moved or copied: replay needs their logical ids, not physical ones",
                "start it without --enable-eplb, --ep-num-redundant-experts and \
                 --init-expert-location, unless the trainer's own routing agrees with the rows",
            ));
        }
        if on(self.enforce_shared_experts_fusion) {
            findings.push(Finding::warning(
                "fused-shared-experts",
                "shared experts may appear as one more chosen expert",
                "start it with --disable-shared-experts-fusion",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Severity;
    use serde_json::json;

    fn findings(change: &serde_json::Value) -> Vec<(&'static str, Severity)> {
        let mut info = json!({
            "version": "0.5.23", "enable_return_routed_experts": true, "pp_size": 1, "dp_size": 1,
            "disaggregation_mode": "null", "moe_runner_backend": "auto", "enable_eplb": false,
            "init_expert_location": "trivial", "ep_num_redundant_experts": 0,
            "speculative_algorithm": null, "flexkv_config_file": null,
        });
        for (key, value) in change.as_object().unwrap() {
            info[key] = value.clone();
        }
        let info: ServerInfo = serde_json::from_value(info).unwrap();
        let found = info.findings();
        assert!(found.iter().all(|f| !f.remedy.is_empty() && !f.words.is_empty()));
        found.into_iter().map(|finding| (finding.name, finding.severity)).collect()
    }

    #[test]
    fn every_unfit_mode_is_named() {
        use Severity::{Refusal, Warning};
        assert_eq!(findings(&json!({})), []);
        for (change, name, severity) in [
            (json!({"version": "0.5.9"}), "version", Refusal),
            (json!({"version": "0.5.10.post1"}), "version", Refusal),
            (json!({"version": null}), "version", Warning),
            (json!({"enable_return_routed_experts": false}), "routing-off", Refusal),
            (json!({"enable_return_routed_experts": null}), "routing-off", Refusal),
            (json!({"pp_size": 2}), "pipeline-parallel", Refusal),
            (json!({"disaggregation_mode": "decode"}), "disaggregation", Refusal),
            (json!({"dp_size": 2}), "data-parallel", Refusal),
            (json!({"enable_hierarchical_cache": true}), "hierarchical-cache", Refusal),
            (json!({"enable_lmcache": true}), "external-cache", Refusal),
            (json!({"flexkv_config_file": "f"}), "external-cache", Refusal),
            (json!({"disable_radix_cache": true}), "prefix-cache-off", Warning),
            (json!({"moe_runner_backend": "flashinfer_trtllm"}), "moe-backend", Refusal),
            (json!({"moe_runner_backend": "flashinfer_mxfp4"}), "moe-backend", Refusal),
            (json!({"moe_runner_backend": "triton_kernel"}), "moe-backend", Refusal),
            (json!({"enable_eplb": true}), "expert-load-balancing", Warning),
            (json!({"ep_num_redundant_experts": 4}), "expert-load-balancing", Warning),
            (json!({"init_expert_location": "f.json"}), "expert-load-balancing", Warning),
            (json!({"enforce_shared_experts_fusion": true}), "fused-shared-experts", Warning),
            (json!({"allow_auto_truncate": true}), "auto-truncate", Refusal),
            (json!({"speculative_algorithm": "EAGLE"}), "speculative-decoding", Warning),
        ] {
            assert_eq!(findings(&change), [(name, severity)], "{change}");
        }
        assert_eq!(findings(&json!({"engine": "orchestrate", "version": "0.1.0"})), []);
        assert_eq!(findings(&json!({"moe_runner_backend": "flashinfer_trtllm_routed"})), []);
    }

    #[test]
    fn priorities_are_sent_only_where_larger_means_sooner() {
        let takes = |info| serde_json::from_value::<ServerInfo>(info).unwrap().takes_priorities();
        assert!(takes(json!({"enable_priority_scheduling": true})));
        assert!(!takes(json!({})));
        let low_first = json!({
            "enable_priority_scheduling": true, "schedule_low_priority_values_first": true
        });
        assert!(!takes(low_first));
    }
}
