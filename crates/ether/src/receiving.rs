//! The threads of an initiator that receive frames: one for each node that has network interfaces.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use jericho_sys::poller::Poller;
use jericho_sys::service;
use jericho_sys::timer::Timer;
use jericho_topology::Topology;

use crate::inside::Inside;
use crate::links::{Links, Receiver};
use crate::placement;

/// Keys of the poller, besides the numbers of interfaces.
const TIMER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;
const CLAIM: u64 = u64::MAX - 2;
/// Connections to the reserved name that are accepted before frames have their turn.
const CONNECTIONS_AT_ONCE: usize = 16;

/// What a thread needs to receive.
pub(crate) struct Receiving {
    name: String,
    node: Option<u32>,
    receiver: Receiver,
    poller: Poller,
    /// Readable when the thread must end.
    _stopped: UnixStream,
    /// The reserved name of the device. The first thread has it, and watches the timer.
    claim: Option<UnixListener>,
}

impl Receiving {
    /// Returns what each thread needs. They end when the other end of `stopped` is closed.
    pub fn new(
        links: &Links,
        timer: &Timer,
        claim: UnixListener,
        stopped: &UnixStream,
    ) -> io::Result<Vec<Receiving>> {
        let mut all = Vec::new();
        let mut claim = Some(claim);
        for (number, (node, nics)) in placement::groups(links.nodes()).into_iter().enumerate() {
            let (receiver, poller) = (links.receiver(nics), Poller::new()?);
            for (nic, socket) in receiver.sockets() {
                poller.add(socket, nic.into())?;
            }
            let stopped = stopped.try_clone()?;
            poller.add(&stopped, STOP)?;
            let claim = claim.take();
            if let Some(claim) = &claim {
                poller.add(claim, CLAIM)?;
                poller.add(timer, TIMER)?;
            }
            let name = match number {
                0 => "remote".to_owned(),
                number => format!("remote-{number}"),
            };
            all.push(Receiving {
                name,
                node,
                receiver,
                poller,
                _stopped: stopped,
                claim,
            });
        }
        Ok(all)
    }

    /// Starts the thread.
    pub fn start(self, inside: Arc<Inside>, topology: Arc<Topology>) -> io::Result<JoinHandle<()>> {
        service::spawn(self.name.clone(), move || {
            placement::pin(&topology, self.node);
            self.run(&inside);
        })
    }

    /// Takes frames and does what is due, until the thread must end.
    fn run(mut self, inside: &Inside) {
        let mut ready = Vec::new();
        let mut has_more = false;
        loop {
            ready.clear();
            let timeout = has_more.then_some(Duration::ZERO);
            if let Err(error) = self.poller.wait(&mut ready, timeout) {
                tracing::error!(%error, "cannot wait for frames");
                std::thread::sleep(Duration::from_millis(10));
            }
            if ready.contains(&STOP) {
                return;
            }
            if ready.contains(&TIMER) {
                inside.timer().clear();
            }
            if let Some(claim) = self.claim.as_ref().filter(|_| ready.contains(&CLAIM)) {
                // The other end has learnt which process this is. It may be any program: frames must not wait for its next connections.
                let accepted = (0..CONNECTIONS_AT_ONCE).map(|_| claim.accept());
                let failed = accepted.filter_map(Result::err).next();
                if failed.is_some_and(|error| error.kind() != io::ErrorKind::WouldBlock) {
                    // Without a free descriptor, accept(2) fails and the socket stays readable: this loop would spin.
                    let _ = self.poller.remove(claim);
                }
            }
            has_more = inside.serve(&mut self.receiver);
        }
    }
}
