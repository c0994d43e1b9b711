//! Ctrl-C and SIGTERM, for commands that say what they did when they are interrupted.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::error::CliError;
use crate::tools::bench::Interrupts;

/// Counts them.
pub fn interrupts() -> Result<Interrupts, CliError> {
    let of =
        |kind| signal(kind).map_err(|error| CliError::Failed(format!("can't wait for signals: {error}")));
    let (mut int, mut term) = (of(SignalKind::interrupt())?, of(SignalKind::terminate())?);
    let (sender, receiver) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                Some(()) = int.recv() => {}
                Some(()) = term.recv() => {}
            }
            if *sender.borrow() == 0 {
                tracing::warn!("interrupted: requests under way end first; interrupt again to end at once");
            }
            sender.send_modify(|count| *count += 1);
        }
    });
    Ok(receiver)
}
