//! Sets a timer for what the protocol has to do next.

use std::time::Duration;

use jericho_sys::timer::Timer;

/// Sets `timer` if something is due before it ends. `ends_at` is when it ends. A timer that is too early costs one wake-up. Setting it again would cost a
/// system call for each request. No time limit of a poller is used, because it may be rounded up to a millisecond.
pub(crate) fn set(
    timer: &Timer,
    ends_at: &mut Option<Duration>,
    now: Duration,
    due: Option<Duration>,
) {
    let is_set = ends_at.filter(|&at| at > now);
    if let Some(due) = due
        && is_set.is_none_or(|at| due < at)
    {
        *ends_at = Some(due);
        if let Err(error) = timer.set(due.saturating_sub(now)) {
            tracing::error!(%error, "cannot set a timer");
        }
    }
}
