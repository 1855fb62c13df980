//! The placement trace of a run: docs/formats/placement-trace.md.

use serde::Serialize;

use crate::error::{Error, Result};
use crate::meter::Meter;
use crate::placement::Way;
use crate::seats::Seat;

/// A line of the trace: the sampled accesses of a thread with the same nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    thread: u64,
    cpu: u16,
    buffer: u16,
    frame: Option<u16>,
    device: Option<u16>,
    bytes: u64,
    op: &'static str,
}

/// Returns the lines of a run from what each thread has done, in the order of the threads. Cached accesses are hits: no device takes part.
///
/// Fails if the nodes of a thread's accesses are unknown, or with direct I/O the node of its device.
pub fn lines(threads: &[(Seat, Meter)], way: Way) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    for (thread, (seat, meter)) in threads.iter().enumerate() {
        if meter.places.is_empty() {
            return Err(Error::new(format!(
                "no trace: the nodes of the accesses of thread {thread} are unknown; use a placement that sets them, for example best, or a longer run"
            )));
        }
        if way == Way::Direct && seat.device.is_none() {
            return Err(Error::new(
                "no trace: the kernel does not tell the node of the device; name it in a topology file",
            ));
        }
        for (place, bytes) in &meter.places {
            // The buffer of a thread is on the node to which it is bound, or where it has run.
            let copied_to = seat.thread.unwrap_or(place.cpu);
            let (buffer, frame, device) = match way {
                Way::Direct => (place.frame, None, seat.device),
                Way::Cached => (copied_to, Some(place.frame), None),
                Way::Memory => return Err(Error::new("no trace: the workload uses no storage")),
            };
            lines.push(Line {
                thread: thread as u64,
                cpu: place.cpu.0,
                buffer: buffer.0,
                frame: frame.map(|node| node.0),
                device: device.map(|node| node.0),
                bytes: *bytes,
                op: match place.is_write {
                    true => "write",
                    false => "read",
                },
            });
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meter::Places;
    use jericho_topology::NodeId;

    fn thread(device: Option<u16>, cpu: u16, frame: u16) -> (Seat, Meter) {
        let seat = Seat {
            device: device.map(NodeId),
            frame: Some(NodeId(frame)),
            thread: None,
        };
        let mut meter = Meter::new().unwrap();
        let place = Places {
            cpu: NodeId(cpu),
            frame: NodeId(frame),
            is_write: false,
        };
        meter.places.insert(place, 4096);
        (seat, meter)
    }

    #[test]
    fn a_hit_has_a_frame_and_no_device_and_a_direct_transfer_the_reverse() {
        let threads = [thread(Some(0), 0, 1)];
        let line = |way| serde_json::to_string(&lines(&threads, way).unwrap()[0]).unwrap();
        assert_eq!(
            line(Way::Cached),
            r#"{"thread":0,"cpu":0,"buffer":0,"frame":1,"device":null,"bytes":4096,"op":"read"}"#
        );
        assert_eq!(
            line(Way::Direct),
            r#"{"thread":0,"cpu":0,"buffer":1,"frame":null,"device":0,"bytes":4096,"op":"read"}"#
        );
    }

    #[test]
    fn unknown_nodes_give_a_message_and_no_trace() {
        let direct = lines(&[thread(None, 0, 1)], Way::Direct).unwrap_err();
        assert!(direct.to_string().contains("topology file"), "{direct}");
        let silent = (Seat::default(), Meter::new().unwrap());
        let cached = lines(&[thread(None, 0, 1), silent], Way::Cached).unwrap_err();
        assert!(cached.to_string().contains("thread 1"), "{cached}");
    }
}
