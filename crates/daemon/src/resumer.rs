//! Takes the slices into use again whose host was away for longer than requests wait for it, as soon as the host answers.
//!
//! No thread joins this thread, because its transfers may wait for a host.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use jericho_fs::{Absences, Resumed};
use jericho_sys::service;

use crate::volume::OpenVolume;

/// Time from the end of one attempt to the next one.
const PERIOD: Duration = Duration::from_millis(500);

/// Starts the thread if the volume has a device of another host. Does nothing if the thread was started before.
pub(crate) fn start(volume: &Arc<OpenVolume>) -> io::Result<()> {
    let absences = volume.fs.absences();
    if !volume.devices.may_fall_silent() || !absences.begin() {
        return Ok(());
    }
    let volume = Arc::downgrade(volume);
    service::spawn("resumer", move || run(&volume, &absences)).map(drop)
}

/// Sleeps until slices wait for their hosts, then tries to take them into use until none waits.
fn run(volume: &Weak<OpenVolume>, absences: &Absences) {
    while absences.wait() {
        let mut is_waiting = true;
        while is_waiting {
            if !absences.pause(PERIOD) {
                return;
            }
            let Some(volume) = volume.upgrade() else {
                return;
            };
            let Resumed {
                slices,
                is_waiting: waits,
            } = volume.fs.resume();
            if !slices.is_empty() {
                let can = match volume.read_only {
                    true => "can be read",
                    false => "take changes",
                };
                tracing::info!(?slices, "a host answers again: its slices {can} again");
            }
            is_waiting = waits;
        }
    }
}
