//! An agent that brings its own loop: a command that runs in the task's sandbox and samples through
//! the gateway.
//!
//! The sandbox has no network. Process 1 listens on the container's loopback and carries the bytes of
//! each connection over its own channel to this program, where the gateway answers them. What the
//! agent sends is placed in a [`Conversation`].

mod config;
mod egress;
mod external;
mod limits;
mod sampler;

#[cfg(test)]
mod histories;

use crate::attempt::Attempt;
use crate::conversation::{Conversation, EndOnDrop, FinishedConversation};
use crate::failure::{failed, sandbox_failed, stopped};
use crate::machine::EpisodeLimits;
use config::SCRIPT_START;
pub use config::{AgentPreset, AgentSection, AgentSettings, ExternalWorkers};
use orchestrate_gateway::{GatewayOptions, router};
use orchestrate_sandbox::{Command, ExecResult, Exit, Forward, Sandbox};
use orchestrate_types::{Limit, Outcome, Stage};
use sampler::{ConversationSampler, MODEL, PLACES};
use std::sync::{Arc, Mutex};
use tokio::io::DuplexStream;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Folder of the agent's files in the sandbox.
pub const AGENT_FOLDER: &str = "/opt/agent";

/// Connections that wait to be served.
const BACKLOG: usize = 64;

/// Bytes kept of each end of the agent's output.
const OUTPUT_BYTES: usize = 64 * 1024;

impl Attempt {
    /// Runs the agent until it ends or must be ended, and takes over its conversation. Returns the limit that
    /// ended it; `None` if it ended by itself.
    ///
    /// # Errors
    /// The outcome of an episode that ended before there was anything to grade.
    #[tracing::instrument(name = "agent", skip_all)]
    pub(crate) async fn run_agent(
        &mut self,
        settings: &AgentSettings,
        limits: EpisodeLimits,
        sandbox: &mut dyn Sandbox,
    ) -> Result<Option<Limit>, Outcome> {
        let Some(script) = settings.script() else {
            let what = "neither agent.command nor agent.preset is set";
            return Err(failed(Stage::Setup, what));
        };
        let conversation = Arc::new(Conversation::new(self.context.clone(), limits));
        let _end = EndOnDrop(Arc::clone(&conversation));
        let sampler = Arc::new(ConversationSampler {
            conversation: Arc::clone(&conversation),
            model: MODEL.to_owned(),
            show_tools: self.context.settings.show_tools,
            takes_tokens: false,
            schemas: Mutex::default(),
            places: Semaphore::new(PLACES),
        });
        let egress = Arc::new(settings.egress.clone());
        let options =
            GatewayOptions { body_limit: body_limit(limits), ..GatewayOptions::default() };
        let routes = router(sampler, options);
        let command = self.command(settings, script, limits);
        let stop = CancellationToken::new();
        let (accepted, mut connections) = mpsc::channel::<DuplexStream>(BACKLOG);
        // Dropped with what is under way: a tunnel may outlive the command that opened it.
        let mut served = JoinSet::new();
        let began = Instant::now();
        let result = {
            let forward = Forward { port: settings.port, accepted, stop: &stop };
            let agent = sandbox.exec_forwarding(&command, forward);
            tokio::pin!(agent);
            let end = self.wait_for_end(&conversation, settings);
            tokio::pin!(end);
            loop {
                tokio::select! {
                    result = &mut agent => break result,
                    Some(connection) = connections.recv() => {
                        let (routes, egress) = (routes.clone(), Arc::clone(&egress));
                        while served.try_join_next().is_some() {}
                        served.spawn(egress::serve(connection, routes, egress));
                    }
                    () = &mut end, if !stop.is_cancelled() => stop.cancel(),
                }
            }
        };
        drop(served);
        self.timings.exec_s += began.elapsed().as_secs_f64();
        let finished = conversation.finish();
        self.timings.generate_s += finished.generate_s;
        let end = match (result, &finished.failure) {
            (_, Some(error)) => Err(failed(Stage::Generate, error)),
            (_, None) if finished.stopped || self.context.stop.is_cancelled() => Err(stopped()),
            (Err(error), None) => Err(sandbox_failed(Stage::Exec, error)),
            // Nothing was sampled, so nothing that the policy did can be the reason. Many agents exit
            // with 0 after a request that was refused, or that left no room for a reply.
            (Ok(result), None)
                if finished.branches.is_empty()
                    && (!result.success()
                        || finished.refusal.is_some()
                        || finished.limit == Some(Limit::SequenceTokens)) =>
            {
                Err(failed(Stage::Setup, never_asked(&result, &finished)))
            }
            (Ok(result), None) => {
                if let Some(refusal) = &finished.refusal {
                    // It does not break the attempt: the policy's commands can send requests, too, and
                    // would earn another attempt with a wrong one.
                    tracing::warn!(refusal, "the last request of the agent was refused");
                }
                let timed_out = matches!(result.exit, Exit::TimedOut);
                let time = timed_out.then_some(Limit::EpisodeTime);
                Ok(finished.limit.or(time))
            }
        };
        self.finished = finished;
        end
    }

    /// Waits until the agent must be ended: the run stops, the engine failed, or nothing is left to
    /// sample and the agent does not end by itself.
    async fn wait_for_end(&self, conversation: &Conversation, settings: &AgentSettings) {
        tokio::select! {
            () = self.context.stop.cancelled() => {}
            failed = conversation.ended() => {
                if !failed {
                    tokio::time::sleep(settings.grace.0).await;
                }
            }
        }
    }

    fn command(&self, settings: &AgentSettings, script: &str, limits: EpisodeLimits) -> Command {
        let task = &self.context.request.task;
        let opening = self.context.settings.opening(task);
        let prompt = opening.last().map_or("", |message| message.content.as_str());
        let host = format!("http://127.0.0.1:{}", settings.port);
        let fixed = [
            ("HOME", "/tmp/home".to_owned()),
            ("TASK_PROMPT", prompt.to_owned()),
            ("MODEL", MODEL.to_owned()),
            ("MODEL_CONTEXT", limits.max_sequence_tokens.to_string()),
            ("AGENT_DIR", AGENT_FOLDER.to_owned()),
            ("OPENAI_BASE_URL", format!("{host}/v1")),
            ("OPENAI_API_KEY", "none".to_owned()),
            ("ANTHROPIC_BASE_URL", host.clone()),
            ("ANTHROPIC_API_KEY", "none".to_owned()),
        ];
        let proxy = (!settings.egress.is_empty()).then(|| {
            let loopback = "127.0.0.1,localhost".to_owned();
            [
                ("HTTPS_PROXY", host.clone()),
                ("https_proxy", host.clone()),
                ("NO_PROXY", loopback.clone()),
                ("no_proxy", loopback),
            ]
        });
        let own = settings.env.iter().filter_map(|variable| variable.split_once('='));
        let own = own.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let script = format!("{SCRIPT_START}{script}");
        Command {
            argv: vec!["/bin/sh".to_owned(), "-c".to_owned(), script],
            env: task
                .variables()
                .chain(fixed.iter().map(|(name, value)| (*name, value.as_str())))
                .chain(proxy.iter().flatten().map(|(name, value)| (*name, value.as_str())))
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .chain(own)
                .collect(),
            timeout: self.context.remaining(),
            keep_bytes: OUTPUT_BYTES,
        }
    }
}

/// Largest request body: a history that fills the longest sequence, with ample space for its JSON. What
/// all connections of an episode hold together stays below a few hundred MiB.
fn body_limit(limits: EpisodeLimits) -> usize {
    limits.max_sequence_tokens.saturating_mul(64).clamp(1 << 20, 8 << 20)
}

/// Why an attempt without a single generation is broken.
fn never_asked(result: &ExecResult, finished: &FinishedConversation) -> String {
    let output = result.text();
    let tail: String =
        output.trim().chars().rev().take(500).collect::<Vec<_>>().into_iter().rev().collect();
    let why = match &finished.refusal {
        Some(refusal) => format!("; its last request was refused: {refusal}"),
        None if finished.limit == Some(Limit::SequenceTokens) => {
            "; its prompt leaves no room for a reply: shorten it, or raise \
             rollout.max_sequence_tokens"
                .to_owned()
        }
        None => String::new(),
    };
    format!("the agent sampled nothing and ended with {}{why}: {tail}", result.exit)
}
