//! What the threads of a target share: one thread for each network interface, which receives, and those that make the device's calls.
//!
//! The protocol has a lock. The threads copy payloads, call the device and send frames without it.

use std::collections::HashMap;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use jericho_format::wire::{HEADER_BYTES, mac_text};
use jericho_remote::{Body, Strange, Target, TargetOutput, Work, hexadecimal};
use jericho_storage::AlignedBuffer;
use jericho_sys::memory::Mapping;
use jericho_sys::timer::Timer;
use jericho_topology::Topology;

use crate::alarm;
use crate::copies::{Copies, await_turn};
use crate::links::{Clock, Links, Place, Receiver};
use crate::lock::{TimedGuard, TimedLock};
use crate::outbox::Outboxes;
use crate::placement;
use crate::recorder::Recorder;
use crate::transfers::Transfers;
use crate::watch::{Watch, thread_name};
use crate::workers::{Ended, Job, Workers};

/// Keys of what is watched besides the sockets.
const BELL: u64 = 1 << 16;
const TIMER: u64 = BELL + 1;
const ENDED: u64 = BELL + 2;

/// A request: session, slot and sequence.
type Name = (u64, u16, u32);

/// The protocol, and what its lock protects.
struct Core {
    target: Target,
    clock: Clock,
    /// When the timer ends.
    timer_at: Option<Duration>,
    /// Session -> its memory.
    pools: HashMap<u64, Arc<Mapping>>,
    /// Payloads of a request that are being copied, and its operation, if all else has arrived.
    copying: HashMap<Name, (u32, Option<Work>)>,
    /// Payloads that are copied without the lock, by the session of the pool.
    copies: Copies,
    /// Operations to begin without the lock.
    jobs: Vec<Job>,
}

pub(crate) struct Serving {
    core: TimedLock<Core>,
    /// Operations that have ended. The next thread that has the core takes them.
    ended: TimedLock<Vec<Ended>>,
    outboxes: Outboxes,
    workers: Arc<Workers>,
    /// Writes the record of the owner, if there is one.
    recorder: Option<Recorder>,
    topology: Arc<Topology>,
    timer: Timer,
}

/// A payload to be copied into a pool without the lock.
struct Copy {
    name: Name,
    pool: Arc<Mapping>,
    at: usize,
    frame: Place,
    length: usize,
}

impl Serving {
    pub fn new(
        target: Target,
        clock: Clock,
        outboxes: Outboxes,
        workers: Arc<Workers>,
        recorder: Option<Recorder>,
        topology: Arc<Topology>,
    ) -> io::Result<Serving> {
        Ok(Serving {
            core: TimedLock::new(Core {
                target,
                clock,
                timer_at: None,
                pools: HashMap::new(),
                copying: HashMap::new(),
                copies: Copies::default(),
                jobs: Vec::new(),
            }),
            ended: TimedLock::new(Vec::new()),
            outboxes,
            workers,
            recorder,
            topology,
            timer: Timer::new()?,
        })
    }

    /// Takes what has arrived at a receiver, and does what is due. Returns whether more may have arrived.
    fn serve(&self, receiver: &mut Receiver, transfers: &mut Option<Transfers>) -> bool {
        // The kernel copies the frames without the lock.
        let has_more = receiver.receive();
        if let Some(transfers) = transfers {
            let ended = transfers.poll(false);
            self.ended.lock().extend(ended);
        }
        let mut core = self.core.lock();
        if let Some((number, copies)) = core.take(receiver) {
            // The pages may have been those of a request that was refused, whose payload another thread still copies.
            core = await_turn(core, number, |core| &core.copies, || self.core.lock());
            drop(core);
            for copy in &copies {
                let payload = &receiver.frame(copy.frame)[HEADER_BYTES..][..copy.length];
                copy.pool.copy_in(copy.at, payload);
            }
            core = self.core.lock();
            core.copies.end(number);
            copies.iter().for_each(|copy| core.copied(copy.name));
        }
        self.settle(core, transfers);
        has_more
    }

    /// Takes the end of an operation, in the thread that has performed it.
    pub fn ended(&self, ended: Ended) {
        self.ended.lock().push(ended);
        // If another thread has the core, that thread takes it.
        if let Some(core) = self.core.try_lock() {
            self.settle(core, &mut None);
        }
    }

    /// Takes the records of the owner that were written.
    fn recorded(&self, transfers: &mut Option<Transfers>) {
        let Some(recorder) = &self.recorder else {
            return;
        };
        let mut core = self.core.lock();
        for (export, owner, is_written) in recorder.take_written() {
            let now = core.clock.now();
            match is_written {
                true if owner.is_attached => core.target.owner_recorded(now, export),
                false if owner.is_attached => core.target.owner_failed(export),
                _ => {}
            }
        }
        self.settle(core, transfers);
    }

    /// Ends the sending threads.
    pub fn stop(&self) {
        self.outboxes.stop();
    }

    /// Has the protocol do what is due, and performs its outputs: what needs the core with its lock, the others without.
    /// `transfers` are those of this thread, if it has some.
    fn settle<'s>(&'s self, mut core: TimedGuard<'s, Core>, transfers: &mut Option<Transfers>) {
        loop {
            for Ended { work, result } in std::mem::take(&mut *self.ended.lock()) {
                core.target.ended(work, result);
            }
            let now = core.clock.now();
            core.target.poll(now);
            self.perform(&mut core);
            let (now, due) = (core.clock.now(), core.target.timer());
            alarm::set(&self.timer, &mut core.timer_at, now, due);
            let jobs = std::mem::take(&mut core.jobs);
            drop(core);
            self.begin(jobs, transfers);
            self.outboxes.send();
            // An operation may have ended while this thread had the core, in a thread that therefore did not wait for it.
            if self.ended.lock().is_empty() {
                return;
            }
            match self.core.try_lock() {
                Some(again) => core = again,
                None => return,
            }
        }
    }

    /// Begins operations.
    fn begin(&self, jobs: Vec<Job>, transfers: &mut Option<Transfers>) {
        let mut buffer = AlignedBuffer::new(0);
        for job in jobs {
            if self.workers.is_instant() {
                let ended = self.workers.perform(job, &mut buffer);
                self.ended.lock().push(ended);
                continue;
            }
            let job = match transfers {
                Some(transfers) => transfers.submit(job),
                None => Some(job),
            };
            if let Some(job) = job {
                self.workers.submit(job);
            }
        }
        if let Some(transfers) = transfers {
            // Some have ended already, if the data is in the kernel's page cache.
            let ended = transfers.poll(false);
            self.ended.lock().extend(ended);
        }
    }

    fn perform(&self, core: &mut Core) {
        while let Some(output) = core.target.next_output() {
            match output {
                TargetOutput::Send(frame) => {
                    let pool = match frame.body {
                        Body::Pool { session, .. } => core.pools.get(&session).cloned(),
                        Body::Bytes(_) => None,
                    };
                    self.outboxes.add(frame, pool);
                }
                TargetOutput::Stranger { mac, key, why } => {
                    let (mac, key) = (mac_text(&mac), hexadecimal(&key));
                    let why = match why {
                        Strange::OtherSecurity => {
                            "it has no key, or was told of another protection than this host's"
                        }
                        Strange::UnknownKey => "no --client has its key",
                        Strange::Forged => {
                            "its frame was not made with the key; somebody may have changed it on the way"
                        }
                    };
                    tracing::warn!("the client at {mac} was refused: {why} (fingerprint {key})");
                }
                TargetOutput::OpenPool {
                    session,
                    pages,
                    client,
                } => {
                    tracing::info!(session, client, "a session begins");
                    let own = core.target.own_pages();
                    match placement::pool(&self.topology, pages, &own) {
                        Ok(pool) => {
                            core.pools.insert(session, Arc::new(pool));
                        }
                        Err(error) => {
                            tracing::error!(%error, session, "there is no memory for the data of a session");
                        }
                    }
                }
                TargetOutput::ClosePool { session } => {
                    tracing::info!(
                        session,
                        protocol = ?self.core.status(),
                        work = ?self.workers.locks(),
                        ended = ?self.ended.status(),
                        send = ?self.outboxes.locks(),
                        "a session has ended; these are the locks"
                    );
                    core.pools.remove(&session);
                }
                TargetOutput::Execute(work) => core.execute(work),
                TargetOutput::RecordOwner { export, owner } => match &self.recorder {
                    // On a thread of its own: the target answers meanwhile.
                    Some(recorder) => recorder.submit(export, owner),
                    None if owner.is_attached => {
                        let now = core.clock.now();
                        core.target.owner_recorded(now, export);
                    }
                    None => {}
                },
            }
        }
    }
}

impl Core {
    /// Takes the frames of a receiver. Copies their payloads, or returns which are to be copied without the lock, with their number.
    fn take(&mut self, receiver: &mut Receiver) -> Option<(u64, Vec<Copy>)> {
        let mut copies = Vec::new();
        let now = self.clock.now();
        receiver.take(|frame_place, link, frame| {
            if let Some((place, payload)) = self.target.on_frame(now, link, frame)
                && let Some(pool) = self.pools.get(&place.session)
            {
                let name = (place.session, place.request.0, place.request.1);
                self.copying.entry(name).or_default().0 += 1;
                copies.push(Copy {
                    name,
                    pool: Arc::clone(pool),
                    at: place.at_bytes as usize,
                    frame: frame_place,
                    length: payload.len(),
                });
            }
        });
        let bytes = |copy: &Copy| (copy.name.0, copy.at..copy.at + copy.length);
        if let Some(number) = self.copies.begin(copies.iter().map(bytes).collect()) {
            return Some((number, copies));
        }
        for copy in copies {
            let payload = &receiver.frame(copy.frame)[HEADER_BYTES..][..copy.length];
            copy.pool.copy_in(copy.at, payload);
            self.copied(copy.name);
        }
        None
    }

    /// Notes that a payload was copied.
    fn copied(&mut self, name: Name) {
        let Some((count, _)) = self.copying.get_mut(&name) else {
            return;
        };
        *count -= 1;
        if *count == 0
            && let Some((_, Some(work))) = self.copying.remove(&name)
        {
            self.execute(work);
        }
    }

    /// Begins an operation, once all of its payloads are copied.
    fn execute(&mut self, work: Work) {
        let mut pool = None;
        if let Work::Request {
            session,
            slot,
            sequence,
            operation,
            ..
        } = work
        {
            if let Some((_, waits)) = self.copying.get_mut(&(session, slot, sequence)) {
                *waits = Some(work);
                return;
            }
            if operation.data_pages() > 0 {
                pool = self.pools.get(&session).cloned();
            }
        }
        self.jobs.push(Job { work, pool });
    }
}

/// What a thread needs to receive the frames of a network interface.
pub(crate) struct Receiving {
    number: usize,
    node: Option<u32>,
    watch: Watch,
    /// Reads and writes that the thread begins itself, unless the device allows blocking calls only.
    transfers: Option<Transfers>,
    /// Readable when a record of the owner was written. The first thread has it. The first thread also watches the timer.
    bell: Option<UnixStream>,
}

impl Receiving {
    /// Returns what each thread needs. They end when the other end of `stopped` is closed.
    pub fn new(
        links: &Links,
        serving: &Serving,
        mut bell: Option<UnixStream>,
        stopped: &UnixStream,
    ) -> io::Result<Vec<Receiving>> {
        let one = |(nic, &node): (usize, &Option<u32>)| {
            let watch = Watch::new(links, vec![nic as u16], stopped)?;
            let transfers = match serving.workers.is_instant() {
                true => None,
                false => Transfers::open(serving.workers.device()),
            };
            if let Some(transfers) = &transfers {
                watch.add(transfers.doorbell(), ENDED)?;
            }
            let bell = bell.take();
            if let Some(bell) = &bell {
                watch.add(bell, BELL)?;
            }
            if nic == 0 {
                watch.add(&serving.timer, TIMER)?;
            }
            Ok(Receiving {
                number: nic,
                node,
                watch,
                transfers,
                bell,
            })
        };
        links.nodes().iter().enumerate().map(one).collect()
    }

    /// Returns the name of the thread.
    pub fn name(&self) -> String {
        thread_name("serve", self.number)
    }

    /// Takes frames and does what is due, until the thread must end.
    pub fn run(mut self, serving: &Serving) {
        placement::pin(&serving.topology, self.node);
        let mut has_more = false;
        while self.watch.wait(has_more) {
            if let Some(transfers) = self
                .transfers
                .as_mut()
                .filter(|_| self.watch.is_ready(ENDED))
            {
                transfers.doorbell().clear();
            }
            if let Some(mut bell) = self.bell.as_ref().filter(|_| self.watch.is_ready(BELL)) {
                let mut bytes = [0; 64];
                while matches!(bell.read(&mut bytes), Ok(1..)) {}
                serving.recorded(&mut self.transfers);
            }
            if self.watch.is_ready(TIMER) {
                serving.timer.clear();
            }
            has_more = serving.serve(&mut self.watch.receiver, &mut self.transfers);
        }
        if let Some(transfers) = &mut self.transfers {
            transfers.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Instant;

    use jericho_remote::{ExportConfig, Security, TargetConfig};

    use super::*;
    use crate::null::null_device;
    use crate::outbox::Mode;
    use crate::socket::{LinkChoice, Opening, Side};

    const INSIDE: &str = "JERICHO_TEST_INSIDE";
    const PATIENCE: Duration = Duration::from_secs(10);

    /// Runs a test again in a network namespace with interfaces t0 and t1. Returns whether this process is inside.
    fn inside(test: &str) -> bool {
        if std::env::var_os(INSIDE).is_some() {
            return true;
        }
        let script = "ip link add t0 mtu 9000 type veth peer name t1 mtu 9000 && ip link set t0 up && ip link set t1 up && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["-Urn", "sh", "-c", script, "sh"]);
        command.arg(std::env::current_exe().expect("this program"));
        let test = format!("serving::tests::{test}");
        command.args([&test, "--exact", "--nocapture"]);
        let status = command.env(INSIDE, "1").status();
        assert!(status.expect("unshare(1)").success(), "{test}");
        false
    }

    fn target(links: &Links) -> Target {
        let export = ExportConfig {
            name: "data".into(),
            size_bytes: 1 << 20,
            is_read_only: false,
            is_hidden: false,
            last_owner: None,
            security: Security::None,
            clients: Vec::new(),
        };
        let config = TargetConfig {
            host: "hostb".into(),
            ethertype: 0x88B5,
            slots: 4,
            pool_pages: 256,
            frames_per_key: 1024,
        };
        let random = Box::new(|| 1);
        Target::new(config, &links.links(), vec![export], random).expect("a target")
    }

    /// Without the timer, acknowledgements would be late, and a frame that was lost on its way to a client would not be sent again.
    #[test]
    fn one_thread_watches_the_timer_with_a_record_of_the_owner_and_without() {
        if !inside("one_thread_watches_the_timer_with_a_record_of_the_owner_and_without") {
            return;
        }
        let topology = Arc::new(Topology::from_spec("virtual:1").expect("a topology"));
        let opening = Opening {
            ethertype: 0x88B5,
            choice: LinkChoice::Packet,
            side: Side::Target,
        };
        let interfaces = ["t0".to_owned(), "t1".to_owned()];
        let links = Links::open(&interfaces, opening, &topology, 1).expect("links");
        let target = target(&links);
        let workers = Workers::new(null_device(1 << 20), links.nodes(), &target.own_pages());
        let (clock, outboxes) = (links.clock(), links.outboxes(Mode::Inline));
        let serving = Serving::new(target, clock, outboxes, Arc::new(workers), None, topology);
        let serving = serving.expect("a timer");
        for has_record in [false, true] {
            let (_stop, stopped) = UnixStream::pair().expect("sockets");
            let (_ring, bell) = UnixStream::pair().expect("sockets");
            let bell = has_record.then_some(bell);
            let mut all = Receiving::new(&links, &serving, bell, &stopped).expect("threads");
            assert_eq!(all.len(), 2);
            serving.timer.set(Duration::ZERO).expect("set");
            let start = Instant::now();
            let mut woken = 0;
            while woken == 0 {
                assert!(start.elapsed() < PATIENCE, "nobody watches the timer");
                for one in &mut all {
                    assert!(one.watch.wait(true));
                    woken += usize::from(one.watch.is_ready(TIMER));
                }
            }
            assert_eq!(woken, 1);
            serving.timer.clear();
        }
    }
}
