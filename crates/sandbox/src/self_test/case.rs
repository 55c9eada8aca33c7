//! What a case of the self-test does, and the outcome it expects.

use crate::api::Exit;
use std::fmt;

/// One case of the self-test.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) action: Action,
    pub(super) expected: Expected,
    pub(super) deadline_ms: u64,
}

/// What is done to a sandbox.
#[derive(Debug, Clone, Copy)]
pub(super) enum Action {
    /// Run a shell script.
    Shell(&'static str),
    /// Run a program with arguments.
    Argv(&'static [&'static str]),
    /// Run a command with an argument of this many bytes, which prints its length.
    Argument(usize),
    /// Run a script, then read the tree.
    ReadTree(&'static str),
    /// Run a script, then write a file at this path.
    Write(&'static str, &'static str),
    /// Run a script, close the sandbox, and look for leftovers in the next one.
    CloseAfter(&'static str),
    /// Run a script whose effect a reset cannot undo, then close the sandbox.
    Spoil(&'static str),
    /// Pause the container while a command runs.
    Pause,
    /// Kill the container while a command runs.
    Kill,
    /// Remove the container while a command runs.
    Remove,
    /// Let the container reach its deadline while a command runs.
    Expire,
    /// Drop the future of a call, then make another call.
    DropCall,
    /// Remove the container while it is idle in the pool.
    RemoveIdle,
}

/// The correct outcome of an action.
#[derive(Debug, Clone, Copy)]
pub(super) enum Expected {
    /// The command ends with this status.
    Ends(Exit),
    /// The command ends with this status and exactly this output.
    Text(Exit, &'static str),
    /// The command ends with this status and this many bytes of output, of which both ends are
    /// kept.
    Bytes(Exit, u64),
    /// The command ends with this status, and its output contains this text.
    Contains(Exit, &'static str),
    /// The command is killed for too much output, of which both ends are kept.
    OutputKilled,
    /// The command ends with this status, after the kernel killed a process for lack of memory.
    OutOfMemory(Exit),
    /// The tree consists of these paths.
    Tree(&'static [&'static str]),
    /// The call fails with this kind of error.
    Fails(ErrorClass),
    /// The next sandbox is another container.
    Replaced,
}

/// The kinds of [`SandboxErrorKind`](crate::SandboxErrorKind) that cases expect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ErrorClass {
    Refused,
    TooLarge,
    Gone,
    Damaged,
    TimedOut,
    Protocol,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ends(exit) => write!(f, "{exit}"),
            Self::Text(exit, text) => write!(f, "{exit} and the output {text:?}"),
            Self::Bytes(exit, bytes) => {
                write!(f, "{exit} and {bytes} bytes, of which both ends are kept")
            }
            Self::Contains(exit, text) => write!(f, "{exit} and an output with {text:?}"),
            Self::OutputKilled => {
                f.write_str("signal 9 for too much output, of which both ends are kept")
            }
            Self::OutOfMemory(exit) => write!(f, "{exit} and an out-of-memory kill"),
            Self::Tree(paths) => write!(f, "the files {}", paths.join(", ")),
            Self::Fails(class) => write!(f, "an error of the kind `{}`", class.name()),
            Self::Replaced => f.write_str("another container"),
        }
    }
}

impl ErrorClass {
    fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::TooLarge => "too large",
            Self::Gone => "gone",
            Self::Damaged => "damaged",
            Self::TimedOut => "timed out",
            Self::Protocol => "protocol",
        }
    }
}
