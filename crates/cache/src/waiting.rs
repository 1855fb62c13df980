//! Requests that wait for busy pages, for frames or for fewer dirty pages: invalidations, stalled Gets, throttled writers.

use crate::context::SliceContext;
use crate::effects::Effects;
use crate::state::SliceState;
use crate::{get, invalidate};

/// Retries all requests that wait. Called after frames were freed, I/O ended or pins were released.
pub(crate) fn retry(state: &mut SliceState, context: &SliceContext, effects: &mut Effects) {
    loop {
        effects.released = false;
        invalidate::retry(state, context, effects);
        get::retry_stalled(state, context, effects);
        while !state.throttled.is_empty() && context.dirty() < u64::from(context.limits.dirty_max) {
            let resume = state.throttled.pop_front();
            effects.done.extend(resume.map(|resume| (resume, Ok(()))));
        }
        // If a Get released pins in this round, other requests may continue.
        if !effects.released {
            return;
        }
    }
}

/// Retries all requests that wait, if a Get has released pins in this step.
pub(crate) fn retry_if_released(
    state: &mut SliceState,
    context: &SliceContext,
    effects: &mut Effects,
) {
    if effects.released {
        retry(state, context, effects);
    }
}
