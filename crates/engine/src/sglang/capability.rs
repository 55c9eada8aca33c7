//! Checks whether the settings in `/server_info` allow training with routing replay.

use crate::capability::{CapabilityFinding, Release, check_version};
use serde::Deserialize;

/// The first release that respects the start of the routing rows.
const OLDEST_RELEASE: Release = (0, 5, 12);
/// MoE backends that hide the chosen experts and report zeros.
const BACKENDS_WITHOUT_ROUTING: [&str; 3] =
    ["flashinfer_trtllm", "flashinfer_mxfp4", "triton_kernel"];

/// The relevant part of `/server_info`. Any field may be absent: older servers have fewer.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ServerInfo {
    /// Name of a server that speaks this dialect; SGLang itself does not send it.
    pub(super) engine: Option<String>,
    pub(super) version: Option<String>,
    pub(super) model_path: Option<String>,
    pub(super) context_length: Option<usize>,
    pub(super) page_size: Option<usize>,
    pub(super) enable_return_routed_experts: Option<bool>,
    pub(super) incremental_streaming_output: Option<bool>,
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

fn is_on(flag: Option<bool>) -> bool {
    flag.unwrap_or(false)
}

fn is_multiple(size: Option<usize>) -> bool {
    size.is_some_and(|size| size > 1)
}

impl ServerInfo {
    pub(super) fn name(&self) -> String {
        let engine = self.engine.as_deref().unwrap_or("sglang");
        format!("{engine} {}", self.version.as_deref().unwrap_or("?"))
    }

    /// Whether it supports priorities, higher first.
    pub(super) fn supports_priorities(&self) -> bool {
        is_on(self.enable_priority_scheduling) && !is_on(self.schedule_low_priority_values_first)
    }

    /// Data-parallel ranks that a request can name, at least 1.
    pub(super) fn ranks(&self) -> usize {
        self.dp_size.filter(|_| is_on(self.enable_dp_attention)).unwrap_or(1)
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

    /// All unsupported or doubtful settings.
    pub(super) fn findings(&self) -> Vec<CapabilityFinding> {
        let mut findings = Vec::new();
        if self.engine.is_none() {
            let defect = "the start of the routing rows is accepted and ignored";
            findings.extend(check_version(
                "SGLang",
                self.version.as_deref(),
                OLDEST_RELEASE,
                defect,
            ));
        }
        if !is_on(self.enable_return_routed_experts) {
            findings.push(CapabilityFinding::refusal(
                "routing-off",
                "the server does not return routed experts",
                "start it with --enable-return-routed-experts",
            ));
        }
        self.judge_cache(&mut findings);
        self.judge_parallelism(&mut findings);
        self.judge_experts(&mut findings);
        if is_on(self.allow_auto_truncate) {
            findings.push(CapabilityFinding::refusal(
                "auto-truncate",
                "the server truncates long prompts silently",
                "start it without --allow-auto-truncate",
            ));
        }
        if let Some(algorithm) = &self.speculative_algorithm {
            findings.push(CapabilityFinding::warning(
                "speculative-decoding",
                format!(
                    "speculative decoding ({algorithm}) returned surplus rows in some releases"
                ),
                "start it without --speculative-algorithm if routing rows are refused",
            ));
        }
        findings
    }

    fn judge_cache(&self, findings: &mut Vec<CapabilityFinding>) {
        if is_on(self.enable_hierarchical_cache) {
            findings.push(CapabilityFinding::refusal(
                "hierarchical-cache",
                "KV entries that HiCache reloads come with the routed experts of other tokens",
                "start it without --enable-hierarchical-cache",
            ));
        }
        if is_on(self.enable_lmcache) || self.flexkv_config_file.is_some() {
            findings.push(CapabilityFinding::refusal(
                "external-cache",
                "KV entries from an external cache come without their routed experts",
                "start it without --enable-lmcache and --flexkv-config-file",
            ));
        }
        if is_on(self.disable_radix_cache) {
            findings.push(CapabilityFinding::warning(
                "prefix-cache-off",
                "every turn prefills the whole conversation again",
                "start it without --disable-radix-cache",
            ));
        }
    }

    fn judge_parallelism(&self, findings: &mut Vec<CapabilityFinding>) {
        if is_multiple(self.pp_size) {
            findings.push(CapabilityFinding::refusal(
                "pipeline-parallel",
                "pipeline stages report zeros for each other's layers",
                "start it with --pp-size 1",
            ));
        }
        let mode = self.disaggregation_mode.as_deref().filter(|mode| *mode != "null");
        if let Some(mode) = mode {
            findings.push(CapabilityFinding::refusal(
                "disaggregation",
                format!("a {mode} worker has only its own half of the rows"),
                "start it without --disaggregation-mode",
            ));
        }
        if is_multiple(self.dp_size) && !is_on(self.enable_dp_attention) {
            findings.push(CapabilityFinding::refusal(
                "data-parallel",
                "weights can only be updated in one data-parallel replica",
                "start one server per replica with --dp-size 1, or add --enable-dp-attention",
            ));
        }
    }

    fn judge_experts(&self, findings: &mut Vec<CapabilityFinding>) {
        let backend = self.moe_runner_backend.as_deref();
        if let Some(backend) = backend.filter(|backend| BACKENDS_WITHOUT_ROUTING.contains(backend))
        {
            findings.push(CapabilityFinding::refusal(
                "moe-backend",
                format!("the MoE kernel {backend} hides the chosen experts"),
                "start it with --moe-runner-backend triton",
            ));
        }
        let moved =
            self.init_expert_location.as_deref().is_some_and(|location| location != "trivial");
        let redundant = self.ep_num_redundant_experts.is_some_and(|count| count > 0);
        if is_on(self.enable_eplb) || redundant || moved {
            findings.push(CapabilityFinding::warning(
                "expert-load-balancing",
                "experts are moved or copied, but replay needs logical expert ids, not physical ones",
                "start it without --enable-eplb, --ep-num-redundant-experts and \
                 --init-expert-location, unless the trainer's own routing agrees with the rows",
            ));
        }
        if is_on(self.enforce_shared_experts_fusion) {
            findings.push(CapabilityFinding::warning(
                "fused-shared-experts",
                "shared experts may appear as an additional chosen expert",
                "start it with --disable-shared-experts-fusion",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::Severity;
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
        assert!(found.iter().all(|f| !f.remedy.is_empty() && !f.problem.is_empty()));
        found.into_iter().map(|finding| (finding.name, finding.severity)).collect()
    }

    #[test]
    fn every_unsupported_mode_is_found() {
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
    fn priorities_are_supported_only_if_higher_means_sooner() {
        let supported =
            |info| serde_json::from_value::<ServerInfo>(info).unwrap().supports_priorities();
        assert!(supported(json!({"enable_priority_scheduling": true})));
        assert!(!supported(json!({})));
        let low_first = json!({
            "enable_priority_scheduling": true, "schedule_low_priority_values_first": true
        });
        assert!(!supported(low_first));
    }
}
