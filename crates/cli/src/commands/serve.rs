//! `orchestrate serve-engine` and `serve-trainer`: the embedded engine and trainer as separate processes.

use crate::args::{ServeEngineArgs, ServeTrainerArgs};
use crate::config::{ConfigError, weight_format};
use crate::error::UsageError;
use crate::{output, paths};
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_http_server::{AllowedFolders, HttpOptions};
use orchestrate_moe::infer::{EngineOptions, serve_engine};
use orchestrate_moe::train::{TrainerOptions, serve_trainer};
use orchestrate_types::ConfigProblem;
use std::process::ExitCode;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Serves a checkpoint until a signal arrives.
pub(crate) async fn engine(args: ServeEngineArgs) -> anyhow::Result<ExitCode> {
    let weight_format = weight_format(&args.weight_format).ok_or_else(|| {
        problem("--weight-format", &args.weight_format, "must be \"q8_0\", \"q4_0\" or \"f32\"")
    })?;
    let token = args.api_key_env.as_deref().map(secret).transpose()?;
    let mut options = EngineOptions {
        weight_format,
        weight_version: args.weight_version,
        max_running: usize::from(args.max_running.get()),
        cache_tokens: args.cache_tokens.get().try_into().unwrap_or(usize::MAX),
        http: args.network.options(args.listen, token)?,
        ..EngineOptions::new(paths::absolute(&args.model)?)
    };
    if !args.checkpoint_roots.is_empty() {
        options.checkpoint_roots = allowed(&args.checkpoint_roots)?;
    }
    let listener = listen(args.listen).await?;
    announce(&args.model, &listener, &options.http)?;
    let stop = CancellationToken::new();
    let server = serve_engine(options, listener, stop.clone());
    until_signal(async { Ok(server.await?) }, stop).await
}

/// Serves the trainer protocol until a signal arrives.
pub(crate) async fn trainer(args: ServeTrainerArgs) -> anyhow::Result<ExitCode> {
    let token = args.token_env.as_deref().map(secret).transpose()?;
    let roots =
        if args.batch_roots.is_empty() { vec![Utf8PathBuf::from(".")] } else { args.batch_roots };
    let options = TrainerOptions {
        policy: paths::absolute(&args.model)?,
        checkpoints: paths::absolute(&args.checkpoints)?,
        keep: args.keep,
        batch_roots: allowed(&roots)?,
        http: args.network.options(args.listen, token)?,
    };
    let listener = listen(args.listen).await?;
    announce(&args.model, &listener, &options.http)?;
    let stop = CancellationToken::new();
    let server = serve_trainer(options, listener, stop.clone());
    until_signal(async { Ok(server.await?) }, stop).await
}

fn allowed(roots: &[Utf8PathBuf]) -> Result<AllowedFolders, UsageError> {
    let roots = roots.iter().map(|root| paths::absolute(root));
    Ok(AllowedFolders::below(roots.collect::<Result<Vec<_>, _>>()?))
}

fn announce(model: &Utf8Path, listener: &TcpListener, http: &HttpOptions) -> anyhow::Result<()> {
    let scheme = if http.tls.is_some() { "https" } else { "http" };
    let address = listener.local_addr()?;
    output::say(format!("loading {model}; listening on {scheme}://{address}"));
    if http.insecure && !address.ip().is_loopback() {
        output::say(format!(
            "warning: --insecure: anybody who reaches {address} may be able to use this server"
        ));
    }
    Ok(())
}

async fn listen(address: std::net::SocketAddr) -> Result<TcpListener, UsageError> {
    TcpListener::bind(address).await.map_err(|source| UsageError::Listen { address, source })
}

fn problem(key: &str, value: &str, remedy: &str) -> ConfigError {
    ConfigError::Problems(vec![ConfigProblem::new(key, value, remedy)])
}

fn secret(variable: &str) -> Result<String, ConfigError> {
    std::env::var(variable)
        .ok()
        .filter(|value| !value.is_empty())
        .ok_or_else(|| problem("environment variable", variable, "must be set to the secret"))
}

async fn until_signal(
    server: impl Future<Output = anyhow::Result<()>>,
    stop: CancellationToken,
) -> anyhow::Result<ExitCode> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let mut server = std::pin::pin!(server);
    // The server is polled again after a signal, so that it can finish what it has started.
    tokio::select! {
        ended = &mut server => ended?,
        _ = tokio::signal::ctrl_c() => { stop.cancel(); server.await?; }
        _ = terminate.recv() => { stop.cancel(); server.await?; }
    }
    Ok(ExitCode::SUCCESS)
}
