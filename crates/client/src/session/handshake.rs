//! Asks a daemon for its segments, and maps them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use jericho_shm::{
    Area, Control, HANDSHAKE_BYTES, Reply, Request, SliceMemory, Slots, socket_name,
};
use jericho_sys::files::ForkMark;
use jericho_sys::handshake::Connection;

use super::segments::Session;

/// Time that the daemon may take for each message of the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);

/// Asks the daemon for its segments and maps them. Fails when the daemon is gone, refuses or answers nonsense, or this process
/// lacks fds or address space.
pub fn receive(
    index: usize,
    mark: &'static ForkMark,
    instance: u64,
    request: Request,
) -> io::Result<Session> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let connection = Connection::connect(&socket_name(instance), HANDSHAKE_TIMEOUT)?;
    connection.send(&request.encode(), &[])?;
    let write = request.token != 0;
    let mut fds = VecDeque::new();
    let next = || -> io::Result<(Reply, Vec<OwnedFd>)> {
        let mut bytes = [0; HANDSHAKE_BYTES];
        let (len, fds) = connection.receive(&mut bytes)?;
        let reply = Reply::decode(&bytes[..len]);
        let reply = reply.ok_or_else(|| bad("the daemon's reply has another version"))?;
        match i32::try_from(reply.error) {
            Ok(0) => Ok((reply, fds)),
            errno => Err(io::Error::from_raw_os_error(errno.unwrap_or(0))),
        }
    };
    let few = || bad("the daemon sent too few segments");
    let (reply, first) = next()?;
    fds.extend(first);
    let mut head = || fds.pop_front().ok_or_else(few);
    let (control, slots, area) = (head()?, head()?, head()?);
    let control = Control::attach(control)?;
    let slots = Slots::attach(slots, control.slot_count(), write)?;
    let area = Area::attach(area)?;
    // The volume may have got more slices meanwhile. This process goes through the kernel for their files.
    if control.slice_count() < reply.slices || control.instance() != instance {
        return Err(bad("the control segment belongs to another daemon"));
    }
    let mut slices = Vec::with_capacity(usize::from(reply.slices));
    for slice in 0..reply.slices {
        let mut segments = Vec::with_capacity(3);
        while segments.len() < 3 {
            match fds.pop_front() {
                Some(fd) => segments.push(fd),
                // The fds of mapped segments are closed already, so that a process with few fds can attach.
                None => match next()?.1 {
                    more if more.is_empty() => return Err(few()),
                    more => fds.extend(more),
                },
            }
        }
        let segments = <[OwnedFd; 3]>::try_from(segments).map_err(|_| few())?;
        let geometry = control.geometry_of(slice)?;
        slices.push(SliceMemory::attach(geometry, segments, write)?);
    }
    Ok(Session::new(index, mark, control, slots, area, slices))
}
