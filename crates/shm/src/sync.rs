//! The atomics and the waits of the protocol; those of the model checker while it runs.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

#[cfg(not(loom))]
pub(crate) use jericho_sys::futex;

#[cfg(not(loom))]
pub(crate) use std::hint::spin_loop;
#[cfg(not(loom))]
pub(crate) use std::thread::yield_now;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::Ordering;
#[cfg(loom)]
pub(crate) use modelled::{AtomicU32, AtomicU64, fence, futex, spin_loop, yield_now};

#[cfg(loom)]
mod modelled {
    //! The checker's atomics, with workarounds for two of its weaknesses.
    //!
    //! The checker treats a SeqCst access as AcqRel, and knows SeqCst only of fences. So each SeqCst access gets a fence before
    //! it, as compilers do for processors without ordered instructions. Two SeqCst accesses of a thread then stay in order; a
    //! SeqCst store and a weaker load after it do not.
    //!
    //! The checker remembers only the last access to a word. So a load hides an earlier load, the checker does not try a store
    //! before that earlier load, and it leaves whole orders out. Therefore each access first notifies a condition variable of the
    //! word, on which no thread waits. A notification orders nothing, and the checker tries it before and after each other
    //! notification of the same word.

    use loom::sync::Condvar;

    use super::Ordering;

    loom::lazy_static! {
        static ref FENCES: Condvar = Condvar::new();
    }

    pub(crate) fn fence(ordering: Ordering) {
        if ordering == Ordering::SeqCst {
            FENCES.notify_all();
        }
        loom::sync::atomic::fence(ordering);
    }

    macro_rules! atomic {
        ($name:ident, $number:ty) => {
            #[derive(Debug)]
            pub(crate) struct $name {
                word: loom::sync::atomic::$name,
                turn: Condvar,
            }

            #[allow(
                dead_code,
                reason = "only models make words, and not all widths use all operations"
            )]
            impl $name {
                pub fn new(value: $number) -> $name {
                    $name {
                        word: loom::sync::atomic::$name::new(value),
                        turn: Condvar::new(),
                    }
                }

                fn before(&self, ordering: Ordering) {
                    if ordering == Ordering::SeqCst {
                        fence(ordering);
                    }
                    self.turn.notify_all();
                }

                pub fn load(&self, ordering: Ordering) -> $number {
                    self.before(ordering);
                    self.word.load(ordering)
                }

                pub fn store(&self, value: $number, ordering: Ordering) {
                    self.before(ordering);
                    self.word.store(value, ordering);
                }

                pub fn compare_exchange(
                    &self,
                    seen: $number,
                    new: $number,
                    success: Ordering,
                    failure: Ordering,
                ) -> Result<$number, $number> {
                    self.before(success);
                    self.word.compare_exchange(seen, new, success, failure)
                }

                // The checker's weak exchange fails no more often than the strong one.
                pub fn compare_exchange_weak(
                    &self,
                    seen: $number,
                    new: $number,
                    success: Ordering,
                    failure: Ordering,
                ) -> Result<$number, $number> {
                    self.compare_exchange(seen, new, success, failure)
                }
            }

            atomic!($name, $number: swap fetch_add fetch_or fetch_and);
        };
        ($name:ident, $number:ty: $($op:ident)*) => {
            #[allow(dead_code, reason = "not all widths use all operations")]
            impl $name {
                $(pub fn $op(&self, value: $number, ordering: Ordering) -> $number {
                    self.before(ordering);
                    self.word.$op(value, ordering)
                })*
            }
        };
    }

    atomic!(AtomicU32, u32);
    atomic!(AtomicU64, u64);

    // A thread that waits with a bound may go on at any time, so these functions do nothing. The checker runs other threads at
    // the accesses around them.
    pub(crate) fn spin_loop() {}
    pub(crate) fn yield_now() {}

    pub(crate) mod futex {
        //! Waits that end at once, as real ones may. `sleep` ends at once only if the word has changed, and otherwise when another
        //! thread wakes it. So the model can show that no thread sleeps on a free lock.

        use std::time::Duration;

        use loom::sync::{Condvar, Mutex};

        use super::AtomicU32;

        loom::lazy_static! {
            static ref QUEUE: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
        }

        #[cfg(test)]
        pub fn sleep(word: &AtomicU32, seen: u32) {
            let queue = QUEUE.0.lock().unwrap();
            if word.load(super::Ordering::SeqCst) == seen {
                drop(QUEUE.1.wait(queue).unwrap());
            }
        }

        pub fn wake_one(_word: &AtomicU32) {
            let _queue = QUEUE.0.lock().unwrap();
            QUEUE.1.notify_one();
        }

        pub fn wait(_word: &AtomicU32, _seen: u32, _timeout: Duration) {}
        pub fn wait_forever(_word: &AtomicU32, _seen: u32) {}
        pub fn wake_all(_word: &AtomicU32) {}
    }
}
