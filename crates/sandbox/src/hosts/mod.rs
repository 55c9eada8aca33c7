//! Several Docker hosts behind one [`SandboxProvider`](crate::SandboxProvider).
//!
//! A [`DockerHosts`] holds one [`DockerProvider`](crate::DockerProvider) per host, and decides only
//! on which host a sandbox is opened; the host's provider does everything else. A host that does
//! not answer is out of service until it does: sandboxes that were open there fail, and new ones
//! are opened elsewhere.
//!
//! The invariant: an image is the same on all hosts of a run, because all hosts share one
//! [`ImageLock`](crate::ImageLock). A host that has another image under the name is not used for
//! it.
//!
//! | File | Contents |
//! |---|---|
//! | `docker_hosts.rs` | the provider: connect, open, sweep, shut down |
//! | `scheduler.rs` | shared state; errors of a host; which host pulls which image |
//! | `request.rs` | one request for a sandbox, and its form in the queue |
//! | `queue.rs` | requests that wait for a slot, first come, first served |
//! | `placement.rs` | which host is best for a request (pure functions) |
//! | `host.rs` | one host: its service state, and images that it cannot provide |
//! | `health.rs` | health checks, and the return to service |

mod docker_hosts;
mod health;
mod host;
mod placement;
mod queue;
mod request;
mod scheduler;

pub use docker_hosts::DockerHosts;
