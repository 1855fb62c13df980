//! The threads of an initiator that receive frames: one for each node that has network interfaces.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;

use jericho_sys::service;
use jericho_sys::timer::Timer;
use jericho_topology::Topology;

use crate::inside::Inside;
use crate::links::Links;
use crate::placement;
use crate::watch::{Watch, thread_name};

/// Keys of what is watched besides the sockets.
const TIMER: u64 = 1 << 16;
const CLAIM: u64 = TIMER + 1;
/// Connections to the reserved name that are accepted before frames have their turn.
const CONNECTIONS_AT_ONCE: usize = 16;

/// What a thread needs to receive.
pub(crate) struct Receiving {
    name: String,
    node: Option<u32>,
    watch: Watch,
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
            let watch = Watch::new(links, nics, stopped)?;
            let claim = claim.take();
            if let Some(claim) = &claim {
                watch.add(claim, CLAIM)?;
                watch.add(timer, TIMER)?;
            }
            all.push(Receiving {
                name: thread_name("remote", number),
                node,
                watch,
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
        let mut has_more = false;
        while self.watch.wait(has_more) {
            if self.watch.is_ready(TIMER) {
                inside.timer().clear();
            }
            if let Some(claim) = self.claim.as_ref().filter(|_| self.watch.is_ready(CLAIM)) {
                // The other end has learnt which process this is. It may be any program: frames must not wait for its next connections.
                let accepted = (0..CONNECTIONS_AT_ONCE).map(|_| claim.accept());
                let failed = accepted.filter_map(Result::err).next();
                if failed.is_some_and(|error| error.kind() != io::ErrorKind::WouldBlock) {
                    // Without a free descriptor, accept(2) fails and the socket stays readable: this loop would spin.
                    let _ = self.watch.remove(claim);
                }
            }
            has_more = inside.serve(&mut self.watch.receiver);
        }
    }
}
