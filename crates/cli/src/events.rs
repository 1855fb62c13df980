//! What ends the daemon of a mount or of an attached disk.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use jericho_fuse::Running;
use jericho_sys::service;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::failure::{Context, Failure};

/// The name of the signal that requests a stop, but never forces one: shells and session managers send it in addition to another signal.
pub const HANGUP: &str = "SIGHUP";

pub enum Event {
    /// The name of a signal that requests a stop.
    Signal(&'static str),
    /// The mount has ended.
    Unmounted(std::io::Result<()>),
}

/// Sends an event for each signal that requests a stop.
pub fn listen_for_signals<E: From<Event> + Send + 'static>(
    events: Sender<E>,
) -> Result<(), Failure> {
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot listen for signals")?;
    service::spawn("signals", move || pass_signals_on(&mut signals, &events))
        .context("cannot start the thread that listens for signals")?;
    Ok(())
}

fn pass_signals_on<E: From<Event>>(signals: &mut Signals, events: &Sender<E>) {
    for signal in signals.forever() {
        let name = match signal {
            SIGTERM => "SIGTERM",
            SIGINT => "SIGINT",
            _ => HANGUP,
        };
        if events.send(Event::Signal(name).into()).is_err() {
            return;
        }
    }
}

/// Sends an event when the mount has ended.
pub fn watch<E: From<Event> + Send + 'static>(
    running: Arc<Running>,
    events: Sender<E>,
) -> Result<(), Failure> {
    std::thread::Builder::new()
        .name("watch".into())
        .spawn(move || {
            // An error is ignored: the receiver has ended and does not wait for this event.
            let _ = events.send(Event::Unmounted(service::run(|| running.wait())).into());
        })
        .context("cannot start the thread that waits for the end of the mount")?;
    Ok(())
}
