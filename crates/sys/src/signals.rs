//! Signals of the calling thread.

/// Runs `doing` with all signals of the calling thread blocked. A signal handler may call it.
pub fn blocked<T>(doing: impl FnOnce() -> T) -> T {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises `all`; pthread_sigmask initialises `before` when it succeeds, and it succeeds with
    // SIG_SETMASK.
    let is_blocked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) == 0
    };
    let result = doing();
    if is_blocked {
        // SAFETY: the call above initialised `before`; the old mask is not requested.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
        }
    }
    result
}
