//! Write-back errors, each reported once to every open description that could have caused them.
//!
//! An error is counted when it happens. Each open description remembers the count that it has seen (`SeenErrors`), as with the
//! `errseq_t` of Linux. So the fsync of one program does not take the error away from the others. A description that is opened
//! after an error sees it only if no description has seen it.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::{Error, Result};

/// The write-back errors of a file or of a volume.
#[derive(Default)]
pub(crate) struct WriteErrors(Mutex<Counted>);

#[derive(Default)]
struct Counted {
    /// Number of errors so far.
    count: u64,
    /// The first error that no description has seen, or else the last one that a description has seen.
    cause: Option<Box<Error>>,
    is_seen: bool,
}

/// The errors that an open description has seen.
#[derive(Default)]
pub struct SeenErrors(AtomicU64);

impl WriteErrors {
    /// Counts an error.
    pub(crate) fn note(&self, error: &Error) {
        let mut counted = self.0.lock();
        counted.count += 1;
        if counted.is_seen || counted.cause.is_none() {
            counted.cause = Some(Box::new(error.clone()));
        }
        counted.is_seen = false;
    }

    /// Returns whether there is an error that no description has seen. Returns true when the lock is busy.
    pub(crate) fn is_unseen(&self) -> bool {
        let counted = self.0.try_lock();
        counted.is_none_or(|counted| counted.cause.is_some() && !counted.is_seen)
    }

    /// Begins to remember what a description sees that is opened now.
    pub(crate) fn opened(&self) -> SeenErrors {
        let counted = self.0.lock();
        let is_unseen = counted.cause.is_some() && !counted.is_seen;
        SeenErrors(AtomicU64::new(counted.count - u64::from(is_unseen)))
    }

    /// Fails with the cause if there was an error that the description has not seen, and counts it as seen.
    pub(crate) fn report(&self, seen: &SeenErrors) -> Result<()> {
        let mut counted = self.0.lock();
        if seen.0.swap(counted.count, Ordering::Relaxed) == counted.count {
            return Ok(());
        }
        counted.is_seen = true;
        match &counted.cause {
            Some(cause) => Err((**cause).clone()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_metadata::errno::{ENOSPC, ESTALE};

    fn errno(result: Result<()>) -> i32 {
        result.err().map_or(0, |error| error.errno())
    }

    #[test]
    fn each_open_description_sees_an_error_once() {
        let errors = WriteErrors::default();
        let (one, other) = (errors.opened(), errors.opened());
        assert!(!errors.is_unseen());
        errors.note(&ENOSPC);
        errors.note(&ESTALE);
        assert!(errors.is_unseen());
        for seen in [&one, &other] {
            assert_eq!(errno(errors.report(seen)), ENOSPC.errno());
            assert_eq!(errno(errors.report(seen)), 0);
        }
        assert!(!errors.is_unseen());
        // A later error, of which the first one to see it is told the cause as well.
        errors.note(&ESTALE);
        assert_eq!(errno(errors.report(&other)), ESTALE.errno());
        assert_eq!(errno(errors.report(&other)), 0);
        assert_eq!(errno(errors.report(&one)), ESTALE.errno());
    }

    #[test]
    fn a_description_that_is_opened_after_an_error_sees_it_if_no_other_has_seen_it() {
        let errors = WriteErrors::default();
        errors.note(&ENOSPC);
        let (second, third) = (errors.opened(), errors.opened());
        assert_eq!(errno(errors.report(&second)), ENOSPC.errno());
        assert_eq!(errno(errors.report(&errors.opened())), 0);
        assert_eq!(errno(errors.report(&third)), ENOSPC.errno());
    }
}
