//! The network access that a task requests.

use super::value::{HarborProblem, Section};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Network access of a part of a task.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkMode {
    /// No network.
    NoNetwork,
    /// Every host: Harbor's default.
    #[default]
    Public,
    /// Only listed hosts.
    Allowlist,
}

/// The network access that a task requests. It is recorded only: containers have no network here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkPolicy {
    /// Kind of access.
    #[serde(default)]
    pub mode: NetworkMode,
    /// Host names, IP addresses and CIDR ranges, for [`NetworkMode::Allowlist`]; empty otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allowed_hosts: Vec<String>,
}

/// The policy of a section; `None` if the section sets none and there is no default.
pub(super) fn policy(
    section: &Section<'_>,
    default: Option<NetworkMode>,
) -> Result<Option<NetworkPolicy>, HarborProblem> {
    let mode = match section.text("network_mode")? {
        None => default,
        Some("no-network") => Some(NetworkMode::NoNetwork),
        Some("public") => Some(NetworkMode::Public),
        Some("allowlist") => Some(NetworkMode::Allowlist),
        Some(_) => {
            return Err(section
                .wrong("network_mode", "must be \"no-network\", \"public\" or \"allowlist\""));
        }
    };
    let hosts = match section.texts("allowed_hosts")? {
        None => None,
        Some(hosts) => {
            let hosts = hosts.iter().map(|host| normalized(host));
            Some(
                hosts
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(|why| section.wrong("allowed_hosts", why))?,
            )
        }
    };
    Ok(match mode {
        None if hosts.is_some() => return Err(only_with_allowlist(section)),
        None => None,
        Some(mode) => {
            let allowed_hosts = hosts.unwrap_or_default();
            if mode != NetworkMode::Allowlist && !allowed_hosts.is_empty() {
                return Err(only_with_allowlist(section));
            }
            Some(NetworkPolicy { mode, allowed_hosts })
        }
    })
}

fn only_with_allowlist(section: &Section<'_>) -> HarborProblem {
    section.wrong("allowed_hosts", "is only valid with network_mode = \"allowlist\"")
}

/// Normalises an entry of an allow-list.
fn normalized(host: &str) -> Result<String, &'static str> {
    const FORM: &str = "must be host names, IP addresses or CIDR ranges, not URLs, ports or paths";
    const WILDCARD: &str = "may have a wildcard only as a leading `*.` before a host name";
    let host = host.trim().to_lowercase();
    let host = host.trim_end_matches('.');
    if host.is_empty() {
        return Err("must not be empty");
    }
    if host.contains('/') {
        return network(host).ok_or(FORM);
    }
    if host.contains(':') {
        return host.parse::<Ipv6Addr>().map(|address| address.to_string()).map_err(|_| FORM);
    }
    if host.contains(['[', ']']) {
        return Err(FORM);
    }
    let name = match host.strip_prefix("*.") {
        Some("") => return Err(WILDCARD),
        Some(name) if name.parse::<IpAddr>().is_ok() => return Err(WILDCARD),
        Some(name) => name,
        None if host.contains('*') => return Err(WILDCARD),
        None => host,
    };
    if name.split('.').all(is_label) { Ok(host.to_owned()) } else { Err(FORM) }
}

fn is_label(label: &str) -> bool {
    let is_valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=63).contains(&label.len())
        && label.chars().all(is_valid)
        && !label.starts_with('-')
        && !label.ends_with('-')
}

/// A CIDR range without host bits, in its shortest form.
fn network(text: &str) -> Option<String> {
    let (address, length) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let (bits, size) = match address {
        IpAddr::V4(address) => (u128::from(u32::from(address)), 32),
        IpAddr::V6(address) => (u128::from(address), 128),
    };
    let is_number = !length.is_empty() && length.chars().all(|c| c.is_ascii_digit());
    let length: u32 = match length.parse::<Ipv4Addr>() {
        _ if is_number => length.parse().ok()?,
        Ok(mask) if size == 32 => mask_length(mask)?,
        Ok(_) | Err(_) => return None,
    };
    let host_bits = size - u32::min(length, size);
    if length > size || (host_bits > 0 && bits & (u128::MAX >> (128 - host_bits)) != 0) {
        return None;
    }
    Some(format!("{address}/{length}"))
}

/// The prefix length of a netmask or host mask.
fn mask_length(mask: Ipv4Addr) -> Option<u32> {
    let bits = u32::from(mask);
    if bits.leading_ones() + bits.trailing_zeros() == 32 || bits == 0 {
        return Some(bits.leading_ones());
    }
    (bits.leading_zeros() + bits.trailing_ones() == 32).then(|| bits.leading_zeros())
}

#[cfg(test)]
mod tests {
    use super::normalized;

    #[test]
    fn entries_have_the_normal_form_that_harbor_gives_them() {
        for (entry, expected) in [
            (" Example.COM. ", Some("example.com")),
            ("*.example.com", Some("*.example.com")),
            ("2001:DB8::0:1", Some("2001:db8::1")),
            ("192.0.2.0/24", Some("192.0.2.0/24")),
            ("192.0.2.0/255.255.255.0", Some("192.0.2.0/24")),
            ("192.0.2.1/24", None),
            ("2001:db8::/32", Some("2001:db8::/32")),
            ("https://example.com", None),
            ("example.com:443", None),
            ("a.*.com", None),
            ("*.192.0.2.1", None),
            ("-a.com", None),
            ("", None),
        ] {
            assert_eq!(normalized(entry).ok().as_deref(), expected, "{entry}");
        }
    }
}
