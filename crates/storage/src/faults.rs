//! Devices that fail on purpose, for tests with the real daemon. Only debug builds with the feature `faults` have them.
//!
//! The environment variable `JERICHO_FAULTS` names a file of orders. It is read before each operation, so a test changes the orders
//! while the daemon runs: it writes another file and renames that file over the orders. No file means no orders. One order a line:
//!
//! ```text
//! DEVICE OPERATION ACTION [offset FIRST..END]
//! ```
//!
//! - DEVICE is the end of a device's name.
//! - OPERATION is `read`, `write`, `flush` or `any`. A durable write is a write and a flush. A discard, a provision and a write of
//!   zeros count as writes.
//! - ACTION is one of
//!     - `fail ERRNO`: the operation fails with EIO, ENOSPC or ENODEV
//!     - `fail-nth N ERRNO [lasting]`: the Nth operation since the order was given fails; `lasting`: the later ones, too
//!     - `hang`: the operation waits until the order is gone
//!     - `delay MILLISECONDSms`: the operation takes longer
//!     - `note`: nothing but a note
//! - `offset` restricts reads and writes to those that touch a byte of the range.
//!
//! Each operation that an order applies to adds a line `DEVICE OPERATION` to the file of notes, whose name is that of the orders
//! with `.notes`. The note is there before the operation fails or hangs. An operation is carried out if no order has it fail.
//!
//! A flush that was ordered to fail fails from then on, as the kernel's do: see `Device::flush`.
//!
//! If the orders cannot be understood, every operation fails with EINVAL.

#[cfg(not(debug_assertions))]
compile_error!("the feature `faults` is for tests only, and not for a release build");

use std::collections::HashMap;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use jericho_sys::errno;

use crate::{Cause, Device, IoError, Layer};

/// The environment variable with the path of the orders.
const VARIABLE: &str = "JERICHO_FAULTS";
/// Pause of an operation that hangs before it looks for its order again.
const HANG_POLL: Duration = Duration::from_millis(2);

/// Returns a device that follows the orders, or the device itself if the environment names none.
pub(crate) fn with_faults(device: Arc<dyn Device>) -> Arc<dyn Device> {
    match std::env::var_os(VARIABLE) {
        Some(orders) => faulty(device, PathBuf::from(orders)),
        None => device,
    }
}

/// Returns a device that follows the orders in a file.
fn faulty(device: Arc<dyn Device>, orders: PathBuf) -> Arc<dyn Device> {
    Arc::new(Faulty {
        device,
        orders,
        counts: Mutex::default(),
        lost: OnceLock::new(),
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Fail(i32),
    FailNth { n: u64, errno: i32, lasting: bool },
    Hang,
    Delay(Duration),
    Note,
}

/// A line of the orders.
#[derive(Clone, Debug)]
struct Order {
    line: String,
    device: String,
    operation: String,
    action: Action,
    range: Range<u64>,
}

impl Order {
    /// Returns `None` for a line that is not an order.
    fn parse(line: &str) -> Option<Order> {
        let (words, range) = match line.split_once(" offset ") {
            Some((words, range)) => {
                let (first, end) = range.split_once("..")?;
                (words, first.parse().ok()?..end.parse().ok()?)
            }
            None => (line, 0..u64::MAX),
        };
        let words: Vec<&str> = words.split_whitespace().collect();
        let (device, operation, action) = match words[..] {
            [device, operation, ref action @ ..] => (device, operation, action),
            _ => return None,
        };
        let action = match action {
            ["fail", errno] => Action::Fail(errno_of(errno)?),
            ["fail-nth", n, errno, rest @ ..] => Action::FailNth {
                n: n.parse().ok()?,
                errno: errno_of(errno)?,
                lasting: match rest {
                    [] => false,
                    ["lasting"] => true,
                    _ => return None,
                },
            },
            ["hang"] => Action::Hang,
            ["delay", time] => Action::Delay(Duration::from_millis(
                time.strip_suffix("ms")?.parse().ok()?,
            )),
            ["note"] => Action::Note,
            _ => return None,
        };
        let is_known = ["read", "write", "flush", "any"].contains(&operation);
        is_known.then(|| Order {
            line: line.to_owned(),
            device: device.to_owned(),
            operation: operation.to_owned(),
            action,
            range,
        })
    }

    fn applies(&self, device: &str, operation: &str, range: &Range<u64>) -> bool {
        let is_here =
            operation == "flush" || (range.start < self.range.end && self.range.start < range.end);
        let is_meant = self.operation == "any" || self.operation == operation;
        is_meant && is_here && device.ends_with(&self.device)
    }
}

fn errno_of(name: &str) -> Option<i32> {
    match name {
        "EIO" => Some(errno::EIO),
        "ENOSPC" => Some(errno::ENOSPC),
        "ENODEV" => Some(errno::ENODEV),
        _ => None,
    }
}

/// Reads the orders. Fails with the first line that is not one.
fn read_orders(path: &Path) -> Result<Vec<Order>, String> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(|error| error.to_string())?,
    };
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| Order::parse(line).ok_or_else(|| line.to_owned()))
        .collect()
}

/// A device that follows orders.
struct Faulty {
    device: Arc<dyn Device>,
    orders: PathBuf,
    /// How many operations each `fail-nth` has met, by its line. Orders that are gone have no count.
    counts: Mutex<HashMap<String, u64>>,
    /// Why a flush failed.
    lost: OnceLock<Cause>,
}

impl Faulty {
    /// Follows the orders for an operation. Fails if one of them says so.
    fn follow(&self, operation: &'static str, range: Range<u64>) -> Result<(), IoError> {
        let name = self.device.name();
        let failed = |errno| IoError {
            operation,
            device: name.clone(),
            offset_bytes: range.start,
            length_bytes: range.end - range.start,
            cause: Cause::Errno(errno),
        };
        let orders = || {
            read_orders(&self.orders).map_err(|what| {
                tracing::error!(orders = %self.orders.display(), what, "cannot understand an order");
                failed(errno::EINVAL)
            })
        };
        let mut all = orders()?;
        self.counts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|line, _| all.iter().any(|order| order.line == *line));
        all.retain(|order| order.applies(&name, operation, &range));
        for order in &all {
            self.note(&order.device, operation);
            match order.action {
                Action::Fail(errno) => return Err(failed(errno)),
                Action::FailNth { n, errno, lasting } => {
                    let count = self.count(&order.line);
                    if count == n || (lasting && count > n) {
                        return Err(failed(errno));
                    }
                }
                Action::Hang => {
                    while orders()?.iter().any(|other| other.line == order.line) {
                        std::thread::sleep(HANG_POLL);
                    }
                }
                Action::Delay(time) => std::thread::sleep(time),
                Action::Note => {}
            }
        }
        Ok(())
    }

    /// Counts an operation for an order. Returns the count.
    fn count(&self, line: &str) -> u64 {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(line.to_owned()).or_default();
        *count += 1;
        *count
    }

    fn note(&self, device: &str, operation: &str) {
        let mut notes = self.orders.clone().into_os_string();
        notes.push(".notes");
        let file = std::fs::File::options()
            .create(true)
            .append(true)
            .open(notes);
        let noted =
            file.and_then(|mut file| file.write_all(format!("{device} {operation}\n").as_bytes()));
        if let Err(error) = noted {
            tracing::error!(%error, "cannot note an operation");
        }
    }

    fn follow_at(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<(), IoError> {
        let range = offset_bytes..offset_bytes.saturating_add(length_bytes);
        self.follow(operation, range)
    }

    /// Follows the orders for a flush. Fails also if an earlier flush was ordered to fail.
    fn follow_flush(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        let followed = self.follow_at("flush", offset_bytes, length_bytes);
        if let Err(error) = &followed {
            self.lost.get_or_init(|| error.cause);
        }
        match self.lost.get() {
            Some(cause) => Err(IoError {
                operation: "flush",
                device: self.device.name(),
                offset_bytes,
                length_bytes,
                cause: *cause,
            }),
            None => Ok(()),
        }
    }
}

impl Layer for Faulty {
    fn below(&self) -> &dyn Device {
        &*self.device
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.follow_at("read", offset_bytes, buf.len() as u64)?;
        self.device.read_at(offset_bytes, buf)
    }

    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.follow_at("write", offset_bytes, buf.len() as u64)?;
        self.device.write_at(offset_bytes, buf)
    }

    fn flush(&self) -> Result<(), IoError> {
        self.follow_flush(0, self.size_bytes())?;
        self.device.flush()
    }

    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        let length_bytes = buf.len() as u64;
        self.follow_at("write", offset_bytes, length_bytes)?;
        if let Err(error) = self.follow_flush(offset_bytes, length_bytes) {
            self.device.write_at(offset_bytes, buf)?;
            return Err(error);
        }
        self.device.write_durable(offset_bytes, buf)
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.follow_at("write", offset_bytes, length_bytes)?;
        self.device.discard(offset_bytes, length_bytes)
    }

    fn provision(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.follow_at("write", offset_bytes, length_bytes)?;
        self.device.provision(offset_bytes, length_bytes)
    }

    fn write_zeros(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.follow_at("write", offset_bytes, length_bytes)?;
        self.follow_flush(offset_bytes, length_bytes)?;
        self.device.write_zeros(offset_bytes, length_bytes)
    }

    fn describe(&self) -> String {
        format!(
            "{}, FAILS as ordered by {}",
            self.device.describe(),
            self.orders.display()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OpenOptions, open_device};

    struct Bed {
        dir: tempfile::TempDir,
        device: Arc<dyn Device>,
    }

    impl Bed {
        fn new() -> Bed {
            let dir = tempfile::tempdir().unwrap();
            let options = OpenOptions {
                create_size: Some(1 << 20),
                ..OpenOptions::default()
            };
            let device = open_device(&dir.path().join("device"), options).unwrap();
            let device = faulty(device, dir.path().join("orders"));
            Bed { dir, device }
        }

        fn order(&self, orders: &str) {
            let new = self.dir.path().join("new");
            std::fs::write(&new, orders).unwrap();
            std::fs::rename(new, self.dir.path().join("orders")).unwrap();
        }

        fn notes(&self) -> String {
            std::fs::read_to_string(self.dir.path().join("orders.notes")).unwrap_or_default()
        }
    }

    fn errno_of<T>(result: Result<T, IoError>) -> Option<i32> {
        result.err().map(|error| error.errno())
    }

    #[test]
    fn operations_fail_as_ordered_and_only_while_they_are_ordered_to() {
        let Bed { device, .. } = &Bed::new();
        let bed = Bed::new();
        let (page, mut buf) = ([7; 4096], [0; 4096]);
        bed.order("/device read fail EIO offset 4096..8192\n/other any fail EIO\n");
        assert_eq!(errno_of(bed.device.write_at(4096, &page)), None);
        assert_eq!(errno_of(bed.device.read_at(0, &mut buf)), None);
        assert_eq!(errno_of(bed.device.read_at(8192, &mut buf)), None);
        assert_eq!(
            errno_of(bed.device.read_at(4096, &mut buf)),
            Some(errno::EIO)
        );
        assert_eq!(
            errno_of(bed.device.read_at(0, &mut [0; 8192])),
            Some(errno::EIO)
        );
        assert_eq!(bed.notes(), "/device read\n/device read\n");
        bed.order("");
        bed.device.read_at(4096, &mut buf).unwrap();
        assert_eq!(buf, page);
        bed.order("device write fail-nth 2 ENOSPC\n");
        let write = || errno_of(bed.device.write_at(0, &page));
        assert_eq!(
            [write(), write(), write()],
            [None, Some(errno::ENOSPC), None]
        );
        bed.order("device write fail-nth 2 ENOSPC lasting\n");
        let failed = Some(errno::ENOSPC);
        assert_eq!([write(), write(), write()], [None, failed, failed]);
        // Another device has other orders, and has none when there is no file.
        assert_eq!(errno_of(device.write_durable(0, &page)), None);
        assert!(bed.device.queue_fd().is_none());
    }

    #[test]
    fn a_flush_that_failed_fails_for_ever() {
        let bed = Bed::new();
        bed.order("device flush fail EIO\n");
        let page = [9; 4096];
        let error = bed.device.write_durable(4096, &page).unwrap_err();
        assert_eq!((error.operation, error.errno()), ("flush", errno::EIO));
        bed.order("");
        assert_eq!(errno_of(bed.device.flush()), Some(errno::EIO));
        assert_eq!(
            errno_of(bed.device.write_durable(0, &page)),
            Some(errno::EIO)
        );
        // The bytes were written nevertheless.
        let mut found = [0; 4096];
        bed.device.read_at(4096, &mut found).unwrap();
        assert_eq!(found, page);
    }

    #[test]
    fn an_operation_hangs_until_its_order_is_gone() {
        let bed = Bed::new();
        bed.order("device flush hang\n");
        std::thread::scope(|scope| {
            let flush = scope.spawn(|| bed.device.flush());
            while bed.notes().is_empty() {
                std::thread::yield_now();
            }
            bed.device.write_at(0, &[1; 4096]).unwrap();
            assert!(!flush.is_finished());
            bed.order("");
            flush.join().unwrap().unwrap();
        });
    }

    #[test]
    fn orders_that_cannot_be_understood_fail_every_operation() {
        let bed = Bed::new();
        for wrong in [
            "device",
            "device flush",
            "device sync fail EIO",
            "device flush fail",
            "device read delay 5",
        ] {
            bed.order(wrong);
            assert_eq!(errno_of(bed.device.flush()), Some(errno::EINVAL), "{wrong}");
            bed.order("");
            // A flush that failed for any reason fails from then on.
            assert_eq!(errno_of(bed.device.read_at(0, &mut [0; 4096])), None);
        }
    }
}
