//! Finds out whether an XDP socket is faster than a packet socket on an interface, without a peer.
//!
//! Only sending can be measured without a peer: no interface gives back what it sends. So the probe measures the CPU time of the calls that send a burst of large frames, by each
//! socket in turn. It also checks that XDP sends the whole burst, because some drivers stop after a part of it. It is used where the driver has
//! zero copy, so that receiving costs a copy less with XDP, too.
//!
//! The frames have the interface's own address as their destination, and a kind that no receiver knows. A switch does not send a frame back, and another host
//! at the end of a cable drops it.

use std::io::IoSlice;
use std::time::Duration;

use jericho_format::wire::HEADER_BYTES;
use jericho_sys::packet::PacketSocket;
use jericho_sys::process;
use jericho_sys::xdp::XdpSocket;

/// Frames of a burst: more than the 64 after which some drivers stop. A link of 1 Gbit/s takes 7 ms for them.
const BURST: usize = 96;
/// Frames that are sent with one call, as in use.
const TOGETHER: usize = 32;
/// Bursts of each socket. The shortest one counts: others were disturbed.
const ROUNDS: usize = 3;
/// How long the interface may take for a burst.
const SENT_WITHIN: Duration = Duration::from_millis(20);
/// XDP must save a tenth of the time. Less is no reason for an XDP program on the interface.
const GAIN: (u32, u32) = (9, 10);

/// Sends bursts through both sockets of an interface. Returns whether XDP needs clearly less CPU time.
pub(crate) fn is_faster(packet: &PacketSocket, xdp: &XdpSocket, ethertype: u16) -> bool {
    let mut header = [0; HEADER_BYTES];
    header[..6].copy_from_slice(&packet.mac());
    header[6..12].copy_from_slice(&packet.mac());
    header[12..14].copy_from_slice(&ethertype.to_be_bytes());
    let payload = vec![0; (packet.mtu() + 14).saturating_sub(HEADER_BYTES)];
    let frame = [IoSlice::new(&header), IoSlice::new(&payload)];
    let burst = [frame; TOGETHER];
    let (mut of_packet, mut of_xdp) = (Duration::MAX, Duration::MAX);
    for _ in 0..ROUNDS {
        let Some(took) = cpu_time(|| packet.send_many(&burst).unwrap_or(0)) else {
            return false;
        };
        of_packet = of_packet.min(took);
        let took = cpu_time(|| xdp.send_many(&burst).unwrap_or(0));
        let (Some(took), true) = (took, xdp.await_sent(SENT_WITHIN)) else {
            tracing::debug!("the XDP socket does not send a burst of {BURST} frames");
            return false;
        };
        of_xdp = of_xdp.min(took);
    }
    tracing::debug!(?of_packet, ?of_xdp, "CPU time of {BURST} frames");
    of_xdp * GAIN.1 < of_packet * GAIN.0
}

/// Returns the CPU time of this thread for a burst. `send` returns how many frames it has sent. Returns `None` if a call sends none.
fn cpu_time(mut send: impl FnMut() -> usize) -> Option<Duration> {
    let start = process::thread_cpu_time();
    let mut sent = 0;
    while sent < BURST {
        match send() {
            0 => return None,
            more => sent += more,
        }
    }
    Some(process::thread_cpu_time().saturating_sub(start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_sys::xdp::{Numbers, Selection};
    use std::process::Command;
    use std::time::Instant;

    const INSIDE: &str = "JERICHO_TEST_INSIDE";
    const ETHERTYPE: u16 = 0x88b5;

    /// Says nothing of the result: it is about this machine. The probe must end soon, and leave nothing behind.
    #[test]
    fn a_probe_is_short_and_reaches_no_other_socket() {
        if std::env::var_os(INSIDE).is_none() {
            let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
            if process::effective_uid() != 0 || !map.split_whitespace().eq(["0", "0", "4294967295"])
            {
                eprintln!("skipped: the probe of XDP needs root");
                return;
            }
            let script = "ip link add t0 mtu 9000 type veth peer name i0 mtu 9000 && ip link set t0 up && ip link set i0 up && exec \"$@\"";
            let mut command = Command::new("unshare");
            command.args(["-n", "sh", "-c", script, "sh"]);
            command.arg(std::env::current_exe().expect("this program"));
            let test = "probe::tests::a_probe_is_short_and_reaches_no_other_socket";
            command.args([test, "--exact", "--nocapture"]);
            let status = command.env(INSIDE, "1").status();
            assert!(status.expect("unshare(1)").success());
            return;
        }
        let open = |name| PacketSocket::open(name, ETHERTYPE, 8 << 20).expect("a socket");
        let (packet, peer) = (open("t0"), open("i0"));
        let selection = Selection {
            ethertype: ETHERTYPE,
            flags_at: 15,
            flags_mask: 2,
            flags: 0,
            number_at: 16,
            numbers: Numbers::AllButZero,
        };
        let of = (packet.mac(), packet.mtu());
        let xdp = XdpSocket::open("t0", of, &selection, None).expect("an XDP socket");
        let start = Instant::now();
        let is_faster = is_faster(&packet, &xdp, ETHERTYPE);
        let took = start.elapsed();
        eprintln!("faster: {is_faster}, after {took:?}");
        // Other programs of a busy machine may take most of it.
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert!(xdp.await_sent(SENT_WITHIN));
        let mut frames = jericho_sys::packet::Frames::new(512, 9018);
        for socket in [&peer, &packet] {
            socket.receive_many(&mut frames).expect("nothing");
            assert_eq!(frames.iter().count(), 0);
        }
    }
}
