//! Threads that other threads depend on.

use std::any::Any;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

/// Runs the body of a thread that other threads depend on. A panic in it ends the process with a message. Without the thread the
/// others would wait for ever, and its unfinished work must not be used.
pub fn run<T>(body: impl FnOnce() -> T) -> T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(value) => value,
        Err(cause) => {
            let thread = std::thread::current();
            // A failure to write the message is ignored; nothing else can be done.
            let _ = writeln!(
                std::io::stderr(),
                "jericho: the thread {} panicked: {}. The process ends, because other threads would wait for it for \
                 ever. What was synced is on the volume: unmount it, and mount it again.",
                thread.name().unwrap_or("without a name"),
                cause_of(&*cause),
            );
            std::process::abort()
        }
    }
}

/// Starts a thread that other threads depend on; see `run`.
pub fn spawn(
    name: impl Into<String>,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(name.into());
    thread.spawn(|| run(body))
}

/// Returns the message of a panic.
fn cause_of(cause: &(dyn Any + Send)) -> &str {
    let text = cause.downcast_ref::<&str>().copied();
    text.or_else(|| cause.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_that_ends_well_gives_its_value() {
        assert_eq!(run(|| 7), 7);
    }

    #[test]
    fn a_thread_runs_its_body_under_its_name() {
        let (send, name) = std::sync::mpsc::channel();
        let body = move || {
            let name = std::thread::current().name().map(str::to_owned);
            send.send(name).unwrap();
        };
        spawn("named", body).unwrap().join().unwrap();
        assert_eq!(name.recv().unwrap().as_deref(), Some("named"));
    }

    #[test]
    fn the_cause_of_a_panic_is_its_message() {
        for (panic, message) in [
            (catch_unwind(|| panic!("plain")), "plain"),
            (catch_unwind(|| panic!("with {}", 7)), "with 7"),
            (
                catch_unwind(|| std::panic::panic_any(7)),
                "without a message",
            ),
        ] {
            assert_eq!(cause_of(&*panic.unwrap_err()), message);
        }
    }
}
