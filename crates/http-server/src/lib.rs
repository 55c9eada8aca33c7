//! The HTTP server of the embedded engine, the trainer, the gateway and the endpoint for Prometheus.
//!
//! [`HttpOptions`] says who may reach a server. `HttpServer::new` refuses an address that other
//! hosts reach without a token or client certificates. `connections` accepts connections, TLS ones
//! with `tls`, and bounds their number and the time of their headers. `guard` then checks every
//! request before a handler sees it: host, origin, token, content type, and the size and time of
//! the body. [`AllowedFolders`] bounds which folders a request may name. A [`ConnectionObserver`]
//! is told when a client has read its replies.

mod body;
mod closing;
mod connections;
mod denial;
mod folders;
mod guard;
mod hosts;
mod options;
mod tls;

pub use closing::ConnectionObserver;
pub use connections::HttpServer;
pub use denial::Denial;
pub use folders::{AllowedFolders, NotAllowed};
pub use guard::Routes;
pub use options::{HttpLimits, HttpOptions, HttpSetupError, TlsFiles};
