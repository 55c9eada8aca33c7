//! One tool server: `[[rollout.tool_servers]]`.

use orchestrate_settings::{Problems, at_least, settings, variable_name};
use orchestrate_types::{HumanDuration, NOT_SHOWN, has_credentials};
use std::collections::HashSet;

/// Longest name of a server, in characters.
const MAX_NAME_CHARS: usize = 32;

settings! {
    /// A Model Context Protocol (MCP) server whose tools the policy can call: `[[rollout.tool_servers]]`.
    /// The coordinator connects to it, not the sandbox.
    #[derive(Eq)]
    [rollout.tool_servers] pub ToolServerSection -> ToolServerSettings;

    /// Name of the server, of lower-case letters, digits and `-`. The policy calls its tools
    /// `NAME__TOOL`.
    name: String = String::new() => "required";
    /// Address of its endpoint for streamable HTTP, e.g. `http://127.0.0.1:8000/mcp`.
    url: String = String::new() => "required";
    /// Name of the environment variable that holds its bearer token.
    token_env: Option<String> = None => "no token is sent",
        variable_name("must be the name of an environment variable, not the token itself");
    /// Tools that the policy can call, as the server names them.
    tools: Option<Vec<String>> = None => "all";
    /// Time for one call, and for opening a session and listing the tools.
    timeout: HumanDuration = HumanDuration::secs(60), at_least(HumanDuration::millis(100));
}

/// Records the problems of all tool servers of a run.
pub(crate) fn check(servers: &[ToolServerSettings], problems: &mut Problems) {
    let mut names = HashSet::new();
    for (index, server) in servers.iter().enumerate() {
        problems.within(&format!("tool_servers[{index}]"), |problems| {
            if !is_name(&server.name) {
                let remedy =
                    format!("must be 1 to {MAX_NAME_CHARS} lower-case letters, digits and `-`");
                problems.refuse("name", format!("{:?}", server.name), remedy);
            } else if !names.insert(&server.name) {
                problems.refuse(
                    "name",
                    &server.name,
                    "must differ from those of the servers above",
                );
            }
            if has_credentials(&server.url) {
                let remedy = "must not contain a user name or a password: name the environment \
                              variable that holds the token in token_env";
                problems.refuse("url", NOT_SHOWN, remedy);
            } else if !is_http_url(&server.url) {
                let remedy = "must be an HTTP URL like \"http://127.0.0.1:8000/mcp\"";
                problems.refuse("url", format!("{:?}", server.url), remedy);
            }
            if server.tools.as_ref().is_some_and(Vec::is_empty) {
                problems.refuse("tools", "[]", "must name a tool; leave it out for all of them");
            }
        });
    }
}

fn is_name(name: &str) -> bool {
    let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !name.is_empty() && name.len() <= MAX_NAME_CHARS && name.bytes().all(is_plain)
}

fn is_http_url(url: &str) -> bool {
    reqwest::Url::parse(url)
        .is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

impl ToolServerSettings {
    /// The bearer token from the environment; `None` if no variable is named. The error is the name of
    /// a variable that is not set, or empty.
    pub(crate) fn token(&self) -> Result<Option<String>, String> {
        let Some(name) = &self.token_env else { return Ok(None) };
        match std::env::var(name) {
            Ok(token) if !token.is_empty() => Ok(Some(token)),
            Ok(_) | Err(_) => Err(name.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RolloutSection;

    #[test]
    fn servers_need_distinct_names_and_addresses_without_secrets() {
        let server = |name: &str, url: &str| ToolServerSection {
            name: Some(name.to_owned()),
            url: Some(url.to_owned()),
            ..ToolServerSection::default()
        };
        let section = |servers: Vec<ToolServerSection>| RolloutSection {
            tool_servers: Some(servers),
            ..RolloutSection::default()
        };
        let url = "http://127.0.0.1:8000/mcp";
        let valid = section(vec![server("search", url), server("search-2", url)]);
        assert_eq!(valid.check().unwrap().tool_servers[1].timeout, HumanDuration::secs(60));
        let none = ToolServerSection { tools: Some(Vec::new()), ..server("b", url) };
        let secret = ToolServerSection {
            token_env: Some("sk-canary!".to_owned()),
            ..server("c", "http://canary:canary@h/mcp")
        };
        let wrong = vec![
            ToolServerSection::default(),
            server("a_b", "localhost:8000"),
            none.clone(),
            none,
            secret,
        ];
        let problems = section(wrong).check().unwrap_err();
        let keys: Vec<String> =
            problems.iter().map(|p| p.key.replace("rollout.tool_servers", "")).collect();
        let expected = [
            "[4].token_env",
            "[0].name",
            "[0].url",
            "[1].name",
            "[1].url",
            "[2].tools",
            "[3].name",
            "[3].tools",
            "[4].url",
        ];
        assert_eq!(keys, expected);
        assert!(problems.iter().all(|problem| !problem.to_string().contains("canary")));
    }
}
