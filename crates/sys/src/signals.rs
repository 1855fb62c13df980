//! Signals of the calling thread.

/// Does something during which no signal handler runs in the calling thread. May be called by a handler.
pub fn blocked<T>(doing: impl FnOnce() -> T) -> T {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises `all`; the call initialises `before` when it succeeds, as it does with a way that exists.
    let is_blocked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) == 0
    };
    let result = doing();
    if is_blocked {
        // SAFETY: initialised by the call above; the mask from before the next one is not asked for.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
        }
    }
    result
}
