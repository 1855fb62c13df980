//! Gets that met a page latched by a writer that makes no progress. They wait for it without a thread.
//!
//! A client that is stopped, or gets no CPU time, may hold a latch for as long as `latches::want` allows. The thread that met the
//! latch continues with other work: its request is parked, and the pipeline checks the latch periodically.

use std::sync::atomic::Ordering::SeqCst;

use crate::context::SliceContext;
use crate::effects::Effects;
use crate::latches;
use crate::requests::Latched;
use crate::state::SliceState;

/// Resumes the Gets whose latch has changed hands; all Gets when the slice closes.
pub(crate) fn retry(state: &mut SliceState, context: &SliceContext, effects: &mut Effects) {
    let closing = context.closing.load(SeqCst);
    for parked in std::mem::take(&mut state.parked) {
        if !closing && is_held(state, context, &parked.latched) {
            state.parked.push(parked);
        } else {
            context.parked.fetch_sub(1, SeqCst);
            let resume = parked.resume;
            effects.done.push((Box::new(move |_| resume()), Ok(())));
        }
    }
}

/// Returns whether the same holder still has the page. The check may take the latch away.
fn is_held(state: &mut SliceState, context: &SliceContext, latched: &Latched) -> bool {
    let (Some(seen), Some(found)) = (latched.word, context.memory.lookup(latched.key)) else {
        return false;
    };
    seen.is_same_holding(found.state) && !latches::want(state, context, found.index, found.state)
}
