//! The simulated device.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use jericho_badlink::Random;
use jericho_storage::{BLOCK_BYTES, Cause, Device, DiscardEffect, IoError};
use jericho_sys::errno;
use parking_lot::Mutex;

use crate::history::{Entry, History};
use crate::hook::Hook;
use crate::image::Image;
use crate::plan::{Counts, Effect, FaultPlan, Operation};
use crate::supply::{Power, PowerSupply};
use crate::traffic::Traffic;

/// The longest wait of a test for an operation that it blocks.
const BEGUN_MAX: Duration = Duration::from_secs(60);

/// Number of operations that the log keeps: the latest ones.
const LOG_ENTRIES_MAX: usize = 100_000;

/// Reports that an operation has begun.
pub struct Begun(Receiver<()>);

impl Begun {
    /// Waits until the operation has begun.
    ///
    /// # Panics
    /// If it does not begin in a minute: a test that waits for ever does not say what it waits for.
    #[track_caller]
    pub fn wait(&self) {
        let has_begun = self.0.recv_timeout(BEGUN_MAX);
        has_begun.expect("the operation did not begin");
    }
}

/// A device in memory with a volatile write cache and planned faults. Its durable writes are writes with FUA, unless it is made
/// `without_fua`.
///
/// A failed flush is final: every later one fails with the same cause, and bytes that were not durable by then never become durable.
/// `FaultPlan::forgets_failed_flushes` makes a device that reports it once.
#[derive(Debug)]
pub struct SimDevice {
    name: Arc<str>,
    /// Usable size.
    size_bytes: AtomicU64,
    /// Size of the hardware, which `Device::grow` makes usable.
    present_bytes: AtomicU64,
    home_node: Option<u32>,
    discard_effect: DiscardEffect,
    /// A durable write is one operation and makes only its own range durable. Otherwise it is a write and a flush.
    has_fua: bool,
    supply: Arc<PowerSupply>,
    hook: Hook,
    state: Mutex<DeviceState>,
}

#[derive(Debug)]
struct DeviceState {
    image: Image,
    plan: FaultPlan,
    counts: Counts,
    traffic: Traffic,
    latencies: Random,
    flush_failed: Option<Cause>,
    history: Option<History>,
    log: VecDeque<Logged>,
    logged: u64,
}

impl DeviceState {
    fn new(image: Image) -> DeviceState {
        DeviceState {
            image,
            plan: FaultPlan::default(),
            counts: Counts::default(),
            traffic: Traffic::default(),
            latencies: Random::new(0),
            flush_failed: None,
            history: None,
            log: VecDeque::new(),
            logged: 0,
        }
    }

    fn record(&mut self, number: u64, entry: impl FnOnce() -> Entry) {
        if let Some(history) = &mut self.history {
            history.push(number, entry());
        }
    }

    /// Writes whole blocks, as many as there is space for. Returns the bytes written.
    fn write(&mut self, step: Step, offset_bytes: u64, data: &[u8], is_durable: bool) -> usize {
        let done = self.image.write(offset_bytes, data, self.plan.room_blocks);
        let is_durable = is_durable && done == data.len() && !step.is_interrupted;
        if is_durable {
            self.image.harden(offset_bytes, done as u64);
        }
        self.record(step.number, || Entry::Write {
            offset_bytes,
            data: data[..done].into(),
            is_durable,
        });
        done
    }
}

/// The part of an operation that the device does.
#[derive(Clone, Copy, Debug)]
struct Step {
    /// Number of the change in the supply's order.
    number: u64,
    /// The power is cut meanwhile: the change reaches the cache at most.
    is_interrupted: bool,
    /// The planned effect.
    effect: Option<Effect>,
}

/// An operation in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logged {
    /// Number of the operation, counted from 1 over the device's life.
    pub number: u64,
    /// The requested operation.
    pub operation: Operation,
    /// Offset; 0 for a flush.
    pub offset_bytes: u64,
    /// Length; 0 for a flush.
    pub length_bytes: u64,
    /// The cause of its failure, if it failed.
    pub failure: Option<Cause>,
}

impl fmt::Display for Logged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Logged {
            number,
            operation,
            offset_bytes,
            length_bytes,
            failure,
        } = self;
        write!(
            f,
            "{number:6} {operation:7} {length_bytes:9} at {offset_bytes:12}"
        )?;
        match failure {
            Some(cause) => write!(f, " FAILED: {cause}"),
            None => Ok(()),
        }
    }
}

impl SimDevice {
    /// Creates a device of zeros that never fails. Rounds the size down to whole blocks.
    pub fn new(name: &str, size_bytes: u64) -> SimDevice {
        let size_bytes = size_bytes - size_bytes % BLOCK_BYTES;
        SimDevice {
            name: name.into(),
            size_bytes: size_bytes.into(),
            present_bytes: size_bytes.into(),
            home_node: None,
            discard_effect: DiscardEffect::Nothing,
            has_fua: true,
            supply: PowerSupply::new(),
            hook: Hook::default(),
            state: Mutex::new(DeviceState::new(Image::default())),
        }
    }

    /// Makes the hardware larger, as lvextend(8) does. `Device::grow` makes the new space usable.
    pub fn enlarge(&self, size_bytes: u64) {
        let size_bytes = size_bytes - size_bytes % BLOCK_BYTES;
        self.present_bytes.fetch_max(size_bytes, Ordering::AcqRel);
    }

    /// Runs `before` at the beginning of each later operation, in the thread that requests it. Replaces an earlier `before`.
    pub fn set_before(&self, before: impl Fn(Operation) + Send + Sync + 'static) {
        self.hook.set(before);
    }

    /// Blocks the next operation of a kind. The receiver reports that it has begun. The operation continues when the sender sends
    /// or is dropped. Replaces an earlier `before` of `set_before`.
    pub fn block_next(&self, kind: Operation) -> (Begun, Sender<()>) {
        let ((begun, has_begun), (go, go_on)) = (channel(), channel());
        let next = Mutex::new(Some((begun, go_on)));
        self.set_before(move |operation| {
            let next = (operation == kind).then(|| next.lock().take()).flatten();
            if let Some((begun, go_on)) = next {
                // The test may have ended.
                let _ = begun.send(());
                let _ = go_on.recv();
            }
        });
        (Begun(has_begun), go)
    }

    /// Returns the same device on a NUMA node.
    pub fn on_node(self, node: u32) -> SimDevice {
        SimDevice {
            home_node: Some(node),
            ..self
        }
    }

    /// Returns the same device, reporting that discards give space back.
    pub fn with_discards(self) -> SimDevice {
        SimDevice {
            discard_effect: DiscardEffect::FreesSpace,
            ..self
        }
    }

    /// Returns the same device without FUA: a durable write is a write and a flush of everything.
    pub fn without_fua(self) -> SimDevice {
        SimDevice {
            has_fua: false,
            ..self
        }
    }

    /// Returns the same device on a power supply that it shares with others.
    pub fn on_supply(self, supply: &Arc<PowerSupply>) -> SimDevice {
        SimDevice {
            supply: Arc::clone(supply),
            ..self
        }
    }

    /// Sets the plan of faults from now on, and resets the counts.
    pub fn set_plan(&self, plan: FaultPlan) {
        let mut state = self.state.lock();
        state.latencies = Random::new(plan.seed);
        state.plan = plan;
        state.counts = Counts::default();
    }

    /// Returns how many operations of a kind (`None`: all) were begun since the plan was set. A fault whose number is larger had no
    /// effect. A test that fails each operation in turn ends when it meets such a number.
    pub fn operations(&self, operation: Option<Operation>) -> u64 {
        self.state.lock().counts.of(operation)
    }

    /// Returns the numbers of operations and bytes since the device was created.
    pub fn traffic(&self) -> Traffic {
        self.state.lock().traffic
    }

    /// Cuts the power of the device's supply: every later operation fails with EIO.
    pub fn cut_power(&self) {
        self.supply.cut();
    }

    /// Returns the device after a power cut. Each change that is not durable is present, lost or torn, as the seed decides. The
    /// new device has a supply of its own, no plan, no hook and an empty log. This device does not change, so that a test can
    /// try many seeds.
    pub fn crash(&self, seed: u64) -> SimDevice {
        self.holding(self.state.lock().image.after_power_cut(seed))
    }

    /// Begins to record changes, for `crash_at` and `as_of_flush`. A recording keeps all bytes that are written.
    pub fn record(&self) {
        let state = &mut *self.state.lock();
        state.history = Some(History::new(state.image.clone()));
    }

    /// Returns the device after a power cut during change number `cut` of its supply (`PowerSupply::changes`), as `crash` does for
    /// a cut now. A number beyond the last change is a cut after all of them.
    ///
    /// # Panics
    /// If `record` was not called before that change.
    pub fn crash_at(&self, cut: u64, seed: u64) -> SimDevice {
        let image = self.recorded(|history| history.image_at(cut));
        self.holding(image.after_power_cut(seed))
    }

    /// Returns the device as it was after flush number `nth` since `record` (0: before the first one), without all later changes.
    /// Simulates a device that is older than the others of its volume.
    ///
    /// # Panics
    /// If `record` was not called, or there were fewer flushes.
    pub fn as_of_flush(&self, nth: u64) -> SimDevice {
        self.holding(self.recorded(|history| history.as_of_flush(nth)))
    }

    fn recorded(&self, image: impl FnOnce(&History) -> Image) -> Image {
        let state = self.state.lock();
        let history = state.history.as_ref();
        image(history.expect("the test must call `record` first"))
    }

    /// Returns a device with the same properties and other contents.
    fn holding(&self, image: Image) -> SimDevice {
        // All of the hardware is usable, as after an open.
        let present_bytes = self.present_bytes.load(Ordering::Acquire);
        SimDevice {
            name: Arc::clone(&self.name),
            size_bytes: present_bytes.into(),
            present_bytes: present_bytes.into(),
            home_node: self.home_node,
            discard_effect: self.discard_effect,
            has_fua: self.has_fua,
            supply: PowerSupply::new(),
            hook: Hook::default(),
            state: Mutex::new(DeviceState::new(image)),
        }
    }

    /// Returns the number of writes and discards that a power cut could undo now.
    pub fn volatile_changes(&self) -> usize {
        self.state.lock().image.cached_changes()
    }

    /// Returns a digest that is equal for equal contents.
    pub fn digest(&self) -> u64 {
        self.state.lock().image.digest()
    }

    /// Returns the latest operations (at most 100,000), oldest first.
    pub fn log(&self) -> Vec<Logged> {
        self.state.lock().log.iter().copied().collect()
    }

    /// Checks, counts, delays and logs an operation around `act`.
    fn perform(
        &self,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
        act: impl FnOnce(&mut DeviceState, Step) -> Result<(), Cause>,
    ) -> Result<(), IoError> {
        self.hook.run(operation);
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.counts.count(operation);
        state.traffic.count(operation, length_bytes);
        let delay = state.plan.latency_max.map(|max| {
            let limit = u64::try_from(max.as_nanos()).unwrap_or(u64::MAX);
            Duration::from_nanos(state.latencies.below(limit.saturating_add(1)))
        });
        let result = self.decide(state, operation, offset_bytes, length_bytes, act);
        state.logged += 1;
        if state.log.len() == LOG_ENTRIES_MAX {
            state.log.pop_front();
        }
        state.log.push_back(Logged {
            number: state.logged,
            operation,
            offset_bytes,
            length_bytes,
            failure: result.err(),
        });
        drop(guard);
        if let Some(delay) = delay {
            std::thread::sleep(delay);
        }
        result.map_err(|cause| self.error(operation, offset_bytes, length_bytes, cause))
    }

    fn decide(
        &self,
        state: &mut DeviceState,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
        act: impl FnOnce(&mut DeviceState, Step) -> Result<(), Cause>,
    ) -> Result<(), Cause> {
        let end = offset_bytes.checked_add(length_bytes);
        let are_blocks =
            offset_bytes.is_multiple_of(BLOCK_BYTES) && length_bytes.is_multiple_of(BLOCK_BYTES);
        if !are_blocks || end.is_none_or(|end| end > self.size_bytes()) {
            return Err(Cause::Errno(errno::EINVAL));
        }
        let is_cut_here = state
            .plan
            .power_cut_at
            .is_some_and(|nth| state.counts.all >= nth);
        let number = match self.supply.begin(operation.is_change(), is_cut_here) {
            Power::On(number) => number,
            Power::Off => return Err(Cause::Errno(errno::EIO)),
            Power::Fails(number) => {
                // The interrupted change goes into the cache, so that `crash` decides about it. The caller learns nothing, so an
                // error of `act` does not matter.
                let _ = act(
                    state,
                    Step {
                        number,
                        is_interrupted: true,
                        effect: None,
                    },
                );
                return Err(Cause::Errno(errno::EIO));
            }
        };
        if let Some((kind, nth)) = state.plan.panic_at
            && kind.is_none_or(|kind| kind == operation)
            && state.counts.of(kind) == nth
        {
            panic!("the plan of the device {} wants a panic", self.name);
        }
        let step = Step {
            number,
            is_interrupted: false,
            effect: state.counts.effect(&state.plan, operation),
        };
        act(state, step)
    }

    /// Writes, as `write_at` (`Operation::Write`) or with FUA (`Operation::DurableWrite`).
    fn write(&self, operation: Operation, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        let length = buf.len() as u64;
        let is_durable = operation == Operation::DurableWrite;
        // Bytes before the block without space.
        let mut stopped = 0;
        let result = self.perform(operation, offset_bytes, length, |state, step| {
            if let Some(cause) = state.flush_failed.filter(|_| is_durable) {
                return Err(cause);
            }
            match step.effect {
                None => {
                    let done = state.write(step, offset_bytes, buf, is_durable);
                    if done < buf.len() {
                        stopped = done as u64;
                        return Err(Cause::Errno(errno::ENOSPC));
                    }
                    Ok(())
                }
                Some(Effect::Errno(errno)) => Err(Cause::Errno(errno)),
                Some(Effect::Short { done_bytes }) => {
                    let done = short(done_bytes, length);
                    let done = state.write(step, offset_bytes, &buf[..done], false);
                    Err(Cause::Short {
                        done_bytes: done as u64,
                    })
                }
            }
        });
        // As on real devices, an error with an errno names only the part that was not written.
        result.map_err(|error| IoError {
            offset_bytes: error.offset_bytes + stopped,
            length_bytes: error.length_bytes - stopped,
            ..error
        })
    }

    /// Returns the error of an operation.
    fn error(
        &self,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
        cause: Cause,
    ) -> IoError {
        let device = Arc::clone(&self.name);
        IoError {
            operation: operation.name(),
            device,
            offset_bytes,
            length_bytes,
            cause,
        }
    }
}

/// Returns the bytes of a short transfer: whole blocks, fewer than requested.
fn short(done_bytes: u64, length_bytes: u64) -> usize {
    let done = done_bytes.min(length_bytes.saturating_sub(1));
    (done - done % BLOCK_BYTES) as usize
}

impl Device for SimDevice {
    fn name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    fn present_bytes(&self) -> Result<u64, IoError> {
        Ok(self.present_bytes.load(Ordering::Acquire))
    }

    fn grow(&self, size_bytes: u64, _allocate_from: Option<u64>) -> Result<(), IoError> {
        let old_bytes = self.size_bytes();
        if size_bytes > self.present_bytes.load(Ordering::Acquire) {
            return Err(IoError {
                operation: "grow",
                device: self.name(),
                offset_bytes: old_bytes,
                length_bytes: size_bytes.saturating_sub(old_bytes),
                cause: Cause::Errno(errno::EOPNOTSUPP),
            });
        }
        self.size_bytes.fetch_max(size_bytes, Ordering::AcqRel);
        Ok(())
    }

    fn home_node(&self) -> Option<u32> {
        self.home_node
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        let length = buf.len() as u64;
        self.perform(
            Operation::Read,
            offset_bytes,
            length,
            |state, step| match step.effect {
                None => {
                    state.image.read(offset_bytes, buf);
                    Ok(())
                }
                Some(Effect::Errno(errno)) => Err(Cause::Errno(errno)),
                Some(Effect::Short { done_bytes }) => {
                    let done = short(done_bytes, length);
                    state.image.read(offset_bytes, &mut buf[..done]);
                    Err(Cause::Short {
                        done_bytes: done as u64,
                    })
                }
            },
        )
    }

    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.write(Operation::Write, offset_bytes, buf)
    }

    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        if self.has_fua {
            return self.write(Operation::DurableWrite, offset_bytes, buf);
        }
        self.write_at(offset_bytes, buf)?;
        self.flush()
    }

    fn flush(&self) -> Result<(), IoError> {
        self.perform(Operation::Flush, 0, 0, |state, step| {
            if step.is_interrupted {
                return Ok(());
            }
            if let Some(cause) = state.flush_failed {
                return Err(cause);
            }
            let cause = match step.effect {
                None => {
                    state.image.flush();
                    state.record(step.number, || Entry::Flush);
                    return Ok(());
                }
                Some(Effect::Errno(errno)) => Cause::Errno(errno),
                Some(Effect::Short { .. }) => Cause::Errno(errno::EIO),
            };
            match state.plan.forgets_failed_flushes {
                true => state.image.lose_cached(state.plan.seed),
                false => state.flush_failed = Some(cause),
            }
            Err(cause)
        })
    }

    /// Discards blocks. They read as garbage afterwards, so that a test detects code that relies on zeros.
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.perform(
            Operation::Discard,
            offset_bytes,
            length_bytes,
            |state, step| match step.effect {
                None => {
                    state.image.discard(offset_bytes, length_bytes);
                    state.record(step.number, || Entry::Discard {
                        offset_bytes,
                        length_bytes,
                    });
                    Ok(())
                }
                Some(Effect::Errno(errno)) => Err(Cause::Errno(errno)),
                Some(Effect::Short { .. }) => Err(Cause::Errno(errno::EIO)),
            },
        )
    }

    fn discard_effect(&self) -> DiscardEffect {
        self.discard_effect
    }

    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn describe(&self) -> String {
        format!(
            "{} (simulated, {} bytes): in memory, threads",
            self.name,
            self.size_bytes()
        )
    }
}
