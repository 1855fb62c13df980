//! XDP sockets on a pair of joined interfaces, a0 and b0, in a network namespace that each test makes. Needs root: in a user namespace, no process
//! may load programs.
#![forbid(unsafe_code)]

use std::io::{ErrorKind, IoSlice};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use jericho_sys::affinity;
use jericho_sys::packet::{Frames, PacketSocket};
use jericho_sys::poller::Poller;
use jericho_sys::process::{effective_uid, thread_cpu_time};
use jericho_sys::xdp::{Numbers, Selection, XdpError, XdpSocket};

const INSIDE: &str = "JERICHO_TEST_INSIDE";
const ETHERTYPE: u16 = 0x88B6;
/// Bytes of a frame before its content: addresses, Ethertype, a byte of flags at 15 and a number at 16.
const HEAD: usize = 20;
const NUMBER: [u8; 4] = [1, 2, 3, 4];
const PATIENCE: Duration = Duration::from_secs(5);
const EMSGSIZE: i32 = 90;

/// Runs a test again in a network namespace. Returns whether this process is inside.
fn inside(test: &str) -> bool {
    inside_with(test, "", "exec \"$@\"")
}

/// Does the same with options of the interfaces, and another way to start the test.
fn inside_with(test: &str, options: &str, start: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    if effective_uid() != 0 || !map.split_whitespace().eq(["0", "0", "4294967295"]) {
        eprintln!("skipped: {test} needs root");
        return false;
    }
    // With a view of the interfaces of its own, and of no others.
    let start = format!("mount -t sysfs sysfs /sys && {start}");
    run(test, "-nm", options, &start);
    false
}

fn run(test: &str, namespaces: &str, options: &str, start: &str) {
    let script = format!(
        "ip link add a0 mtu 9000 {options} type veth peer name b0 mtu 9000 {options} && ip link set a0 up && ip link set b0 up && {start}"
    );
    let mut command = Command::new("unshare");
    command.args([namespaces, "sh", "-c", &script, "sh"]);
    command.arg(std::env::current_exe().expect("this program"));
    command.args([test, "--exact", "--nocapture"]);
    let status = command.env(INSIDE, "1").arg0("unshare").status();
    assert!(
        status.expect("unshare(1) of util-linux").success(),
        "{test} failed inside"
    );
}

fn selection(numbers: Numbers) -> Selection {
    Selection {
        ethertype: ETHERTYPE,
        flags_at: 15,
        flags_mask: 2,
        flags: 2,
        number_at: 16,
        numbers,
    }
}

/// Both sockets of an interface.
struct End {
    packet: PacketSocket,
    xdp: XdpSocket,
    poller: Poller,
    frames: Frames,
}

impl End {
    fn open(interface: &str, numbers: Numbers) -> End {
        End::try_open(interface, numbers).unwrap_or_else(|error| panic!("{error}"))
    }

    fn try_open(interface: &str, numbers: Numbers) -> Result<End, XdpError> {
        let packet = PacketSocket::open(interface, ETHERTYPE, 4 << 20).expect("a packet socket");
        let of = (packet.mac(), packet.mtu());
        let xdp = XdpSocket::open(interface, of, &selection(numbers), None)?;
        let poller = Poller::new().expect("a poller");
        for fd in xdp.fds() {
            poller.add(fd, 0).expect("a watched socket");
        }
        Ok(End {
            packet,
            xdp,
            poller,
            frames: Frames::new(32, 9018),
        })
    }

    /// Receives what is there through the XDP socket.
    fn take(&mut self) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        loop {
            self.xdp.receive_many(&mut self.frames);
            let before = all.len();
            all.extend(self.frames.iter().map(<[u8]>::to_vec));
            if all.len() == before {
                return all;
            }
        }
    }

    /// Receives a number of frames through the XDP socket.
    fn expect(&mut self, count: usize) -> Vec<Vec<u8>> {
        let start = Instant::now();
        let mut all = Vec::new();
        while all.len() < count {
            let wait = Some(Duration::from_millis(100));
            self.poller.wait(&mut Vec::new(), wait).expect("a wait");
            all.extend(self.take());
            assert!(
                start.elapsed() < PATIENCE,
                "{} of {count} frames",
                all.len()
            );
        }
        all
    }

    /// Receives what comes through the packet socket for some time.
    fn passed(&mut self) -> Vec<Vec<u8>> {
        std::thread::sleep(Duration::from_millis(50));
        let _ = self.packet.receive_many(&mut self.frames);
        self.frames.iter().map(<[u8]>::to_vec).collect()
    }

    /// Sends a frame from the other end. Returns whether one arrives.
    fn gets_one(&mut self, from: &End, one: &[u8]) -> bool {
        let _ = from.xdp.send_many(&[pieces(one)]);
        std::thread::sleep(Duration::from_millis(10));
        !self.take().is_empty()
    }
}

fn pieces(frame: &[u8]) -> [IoSlice<'_>; 2] {
    let (head, rest) = frame.split_at(HEAD);
    [IoSlice::new(head), IoSlice::new(rest)]
}

/// Makes a frame from one end to another, which its XDP socket takes.
fn frame(to: &End, from: &End, length: usize, seed: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..length).map(|at| (at * 7 + seed) as u8).collect();
    frame[..6].copy_from_slice(&to.packet.mac());
    frame[6..12].copy_from_slice(&from.packet.mac());
    frame[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
    (frame[14], frame[15]) = (0, 2);
    frame[16..HEAD].copy_from_slice(&NUMBER);
    frame
}

/// Sends frames through the XDP socket, and waits for room.
fn send(end: &End, frames: &[Vec<u8>]) {
    let all: Vec<_> = frames.iter().map(|frame| pieces(frame)).collect();
    let (start, mut sent) = (Instant::now(), 0);
    while sent < all.len() {
        match end.xdp.send_many(&all[sent..]) {
            Ok(more) => sent += more,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        assert!(start.elapsed() < PATIENCE, "{sent} frames were sent");
    }
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status();
    assert!(status.expect("ip(8)").success(), "ip {arguments}");
}

#[test]
fn frames_of_all_lengths_arrive_unchanged_in_both_directions() {
    if !inside("frames_of_all_lengths_arrive_unchanged_in_both_directions") {
        return;
    }
    let mut a = End::open("a0", Numbers::AllButZero);
    let mut b = End::open("b0", Numbers::AllButZero);
    // Around the sizes of chunks that send (4096) and receive (3840), and up to the MTU.
    let edges = [60, 64, 1514, 3839, 3840, 3841, 4095, 4096, 4097];
    let longer = [7680, 7681, 8192, 8193, 8256, 8272, 8960, 9014];
    for round in 0..50 {
        for (seed, length) in edges.into_iter().chain(longer).enumerate() {
            let there = frame(&b, &a, length, seed + round);
            send(&a, std::slice::from_ref(&there));
            assert!(b.expect(1) == [there], "{length} bytes");
            let back = frame(&a, &b, length, seed + round + 1);
            send(&b, std::slice::from_ref(&back));
            assert!(a.expect(1) == [back], "{length} bytes");
        }
    }
    // From and to a packet socket.
    let there = frame(&b, &a, 8256, 3);
    assert_eq!(a.packet.send_many(&[pieces(&there)]).expect("sent"), 1);
    assert!(b.expect(1) == [there]);
    let mut back = frame(&a, &b, 8256, 4);
    back[15] = 0;
    send(&b, std::slice::from_ref(&back));
    assert!(a.passed() == [back]);
    let long = frame(&b, &a, 9100, 5);
    let error = a.xdp.send_many(&[pieces(&long)]).expect_err("too long");
    assert_eq!(error.raw_os_error(), Some(EMSGSIZE), "{error}");
}

#[test]
fn long_bursts_arrive_without_a_stall() {
    if !inside("long_bursts_arrive_without_a_stall") {
        return;
    }
    let a = End::open("a0", Numbers::AllButZero);
    let mut b = End::open("b0", Numbers::AllButZero);
    for (length, count) in [(60, 65), (60, 200), (8256, 65), (8256, 200)] {
        for round in 0..20 {
            let frames = (0..count).map(|n| frame(&b, &a, length, n + round));
            let burst: Vec<_> = frames.collect();
            send(&a, &burst);
            let start = Instant::now();
            // In order, because one queue has them.
            assert!(b.expect(count) == burst);
            // A stall takes until the next system call of the sender, which does not come.
            let took = start.elapsed();
            assert!(took < Duration::from_secs(2), "{took:?}");
            assert!(a.xdp.await_sent(PATIENCE), "the chunks come back");
        }
    }
}

#[test]
fn a_receiver_that_sleeps_loses_frames_and_no_chunks() {
    if !inside("a_receiver_that_sleeps_loses_frames_and_no_chunks") {
        return;
    }
    let a = End::open("a0", Numbers::AllButZero);
    let mut b = End::open("b0", Numbers::AllButZero);
    let room = b.xdp.frames();
    assert!(room >= 256, "{room}");
    for _ in 0..3 {
        for first in (0..4 * room).step_by(32) {
            let burst: Vec<_> = (0..32).map(|n| frame(&b, &a, 9014, first + n)).collect();
            send(&a, &burst);
        }
        assert!(a.xdp.await_sent(PATIENCE));
        let got = b.take();
        let count = got.len();
        assert!((room / 2..=room + 1).contains(&count), "{count} of {room}");
        // The first ones are there, and whole.
        for (n, one) in got.iter().take(64).enumerate() {
            assert!(*one == frame(&b, &a, 9014, n));
        }
    }
    let last = frame(&b, &a, 9014, 1);
    send(&a, std::slice::from_ref(&last));
    assert!(b.expect(1) == [last]);
}

#[test]
fn a_socket_can_be_dropped_while_frames_are_in_flight() {
    if !inside("a_socket_can_be_dropped_while_frames_are_in_flight") {
        return;
    }
    for round in 0..10 {
        let a = End::open("a0", Numbers::AllButZero);
        let b = End::open("b0", Numbers::AllButZero);
        let burst: Vec<_> = (0..100).map(|n| frame(&b, &a, 8256, n)).collect();
        send(&a, &burst);
        if round % 2 == 0 {
            drop(a);
            drop(b);
        } else {
            drop(b);
            send(&a, &burst);
        }
    }
    let a = End::open("a0", Numbers::AllButZero);
    let mut b = End::open("b0", Numbers::AllButZero);
    let one = frame(&b, &a, 8256, 1);
    send(&a, std::slice::from_ref(&one));
    assert!(b.expect(1) == [one]);
}

#[test]
fn all_frames_that_are_not_selected_reach_packet_sockets() {
    if !inside("all_frames_that_are_not_selected_reach_packet_sockets") {
        return;
    }
    let a = End::open("a0", Numbers::AllButZero);
    let mut b = End::open("b0", Numbers::Listed);
    let ours = frame(&b, &a, 8256, 1);
    let changed = |at: usize, byte: u8| {
        let mut other = ours.clone();
        other[at] = byte;
        other
    };
    // Nothing is listed yet.
    send(&a, std::slice::from_ref(&ours));
    assert!(b.passed() == [ours.clone()]);
    b.xdp.list(NUMBER).expect("a listed number");
    let mut broadcast = ours.clone();
    broadcast[..6].fill(0xff);
    let others = [changed(15, 1), changed(16, 9), broadcast];
    send(&a, &others);
    assert!(b.passed() == others);
    send(&a, std::slice::from_ref(&ours));
    assert!(b.expect(1) == [ours.clone()]);
    assert!(b.passed().is_empty());
    // Flags count only as far as they are selected.
    send(&a, &[changed(15, 3)]);
    b.expect(1);
    // Another Ethertype.
    let other = PacketSocket::open("b0", 0x88B7, 1 << 20).expect("a packet socket");
    let strange = changed(13, 0xB7);
    send(&a, std::slice::from_ref(&strange));
    std::thread::sleep(Duration::from_millis(50));
    other.receive_many(&mut b.frames).expect("a frame");
    assert!(b.frames.iter().eq([&strange[..]]));
    // A second program is refused, and the first one works on.
    let error = End::try_open("b0", Numbers::AllButZero).err();
    let error = error.expect("it is refused").to_string();
    assert!(error.contains("b0"), "{error}");
    assert!(error.contains("--link packet"), "{error}");
    send(&a, std::slice::from_ref(&ours));
    assert!(b.expect(1) == [ours.clone()]);
    // With the socket, the program is gone.
    drop(b.xdp);
    a.xdp.send_many(&[pieces(&ours)]).expect("sent");
    std::thread::sleep(Duration::from_millis(50));
    b.packet.receive_many(&mut b.frames).expect("a frame");
    assert!(b.frames.iter().eq([&ours[..]]));
}

#[test]
fn frames_arrive_on_an_interface_with_several_queues() {
    let test = "frames_arrive_on_an_interface_with_several_queues";
    if !inside_with(test, "numtxqueues 4 numrxqueues 4", "exec \"$@\"") {
        return;
    }
    let a = End::open("a0", Numbers::AllButZero);
    let mut b = End::open("b0", Numbers::AllButZero);
    assert_eq!(b.xdp.fds().count(), 4);
    // The kernel may hash the addresses for the queue. The test of a busy queue sends to each queue for certain.
    for source in 0..32 {
        let mut one = frame(&b, &a, 8256, 1);
        one[11] = source;
        a.packet.send_many(&[pieces(&one)]).expect("sent");
        assert!(b.expect(1) == [one.clone()]);
        send(&a, std::slice::from_ref(&one));
        assert!(b.expect(1) == [one]);
    }
}

/// Sends frames through the packet socket.
fn send_packets(end: &End, frames: &[Vec<u8>]) {
    let all: Vec<_> = frames.iter().map(|frame| pieces(frame)).collect();
    let mut sent = 0;
    while sent < all.len() {
        sent += end.packet.send_many(&all[sent..]).expect("sent");
    }
}

#[test]
fn a_queue_that_is_always_busy_keeps_no_other_one_waiting() {
    const PLACES: usize = 8;
    let test = "a_queue_that_is_always_busy_keeps_no_other_one_waiting";
    if !inside_with(test, "numtxqueues 2 numrxqueues 2", "exec \"$@\"") {
        return;
    }
    let a = End::open("a0", Numbers::AllButZero);
    let mut b = End::open("b0", Numbers::AllButZero);
    let poller = Poller::new().expect("a poller");
    for (queue, fd) in (0..).zip(b.xdp.fds()) {
        poller.add(fd, queue).expect("a watched socket");
    }
    let ready = || {
        let mut ready = Vec::new();
        let wait = Some(PATIENCE);
        poller.wait(&mut ready, wait).expect("a wait");
        ready
    };
    // The kernel chooses the queue by the CPU of the sender.
    let cpus = affinity::get(None).expect("the CPUs");
    let [first, .., last] = cpus[..] else {
        eprintln!("skipped: this test needs two CPUs");
        return;
    };
    for (queue, cpu) in [(0, first), (1, last)] {
        let words: Vec<_> = (0..=cpu / 32)
            .rev()
            .map(|word| match cpu / 32 == word {
                true => format!("{:08x}", 1_u32 << (cpu % 32)),
                false => "0".repeat(8),
            })
            .collect();
        let path = format!("/sys/class/net/a0/queues/tx-{queue}/xps_cpus");
        std::fs::write(path, words.join(",")).expect("a queue of a CPU");
    }
    let send_from = |cpu: u32, frames: &[Vec<u8>]| {
        affinity::set(None, &[cpu]).expect("a CPU");
        send_packets(&a, frames);
    };
    let one = frame(&b, &a, 60, 200);
    let mut senders = [first; 2];
    for cpu in [first, last] {
        send_from(cpu, std::slice::from_ref(&one));
        senders[ready()[0] as usize] = cpu;
        b.expect(1);
    }
    assert_ne!(senders[0], senders[1], "both queues are used");
    for busy in [0, 1] {
        for _ in 0..8 {
            let many: Vec<_> = (0..8 * PLACES).map(|n| frame(&b, &a, 60, n)).collect();
            send_from(senders[busy], &many);
            send_from(senders[1 - busy], std::slice::from_ref(&one));
            let start = Instant::now();
            while ready().len() < 2 {
                assert!(start.elapsed() < PATIENCE, "frames of both queues");
            }
            // The busy one has frames for more than these calls.
            let mut frames = Frames::new(PLACES, 9018);
            let (mut is_there, mut count) = (false, 0);
            for _ in 0..2 {
                b.xdp.receive_many(&mut frames);
                is_there |= frames.iter().any(|frame| *frame == one);
                count += frames.iter().count();
            }
            assert!(is_there, "the queue beside {busy} had no turn");
            b.expect(many.len() + 1 - count);
        }
    }
}

fn tc(arguments: &str) {
    let status = Command::new("tc").args(arguments.split(' ')).status();
    assert!(status.expect("tc(8)").success(), "tc {arguments}");
}

/// Frames wait behind a bridge, in a slow queue of one of its interfaces, and keep their chunks meanwhile.
#[test]
fn sending_waits_for_memory_and_goes_on_when_it_is_back() {
    // More than all chunks, and less than the receiver has.
    const FRAMES: usize = 1500;
    const CHUNKS: usize = 1024;
    if !inside("sending_waits_for_memory_and_goes_on_when_it_is_back") {
        return;
    }
    ip("link add br0 mtu 9000 type bridge");
    ip("link set a0 master br0");
    ip("link set br0 up");
    tc("qdisc add dev a0 root tbf rate 1mbit burst 2k limit 10mb");
    let a = End::open("br0", Numbers::AllButZero);
    let mut b = End::open("b0", Numbers::AllButZero);
    for by_waiting in [false, true] {
        tc("qdisc change dev a0 root tbf rate 1mbit burst 2k limit 10mb");
        let frames: Vec<_> = (0..FRAMES).map(|n| frame(&b, &a, 60, n)).collect();
        let all: Vec<_> = frames.iter().map(|frame| pieces(frame)).collect();
        let mut sent = 0;
        loop {
            match a.xdp.send_many(&all[sent..]) {
                Ok(more) => sent += more,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                    break;
                }
            }
            assert!(sent < FRAMES, "the queue is slow");
        }
        assert!(sent >= CHUNKS, "{sent}");
        assert!(!a.xdp.await_sent(Duration::from_millis(1)));
        tc("qdisc change dev a0 root tbf rate 1gbit burst 2k limit 10mb");
        if by_waiting {
            assert!(a.xdp.await_sent(PATIENCE), "the chunks come back");
            let more = a.xdp.send_many(&all[sent..]).expect("there is memory");
            assert_eq!(more, FRAMES - sent);
        } else {
            send(&a, &frames[sent..]);
        }
        // In order, because no frame overtakes those that wait.
        assert!(b.expect(FRAMES) == frames);
        assert!(a.xdp.await_sent(PATIENCE));
    }
}

#[test]
fn a_link_that_was_down_works_again() {
    if !inside("a_link_that_was_down_works_again") {
        return;
    }
    let a = End::open("a0", Numbers::AllButZero);
    let mut b = End::open("b0", Numbers::AllButZero);
    for down in ["a0", "b0"] {
        ip(&format!("link set {down} down"));
        let one = frame(&b, &a, 8256, 1);
        for _ in 0..1000 {
            // No caller waits for it.
            let _ = a.xdp.send_many(&[pieces(&one)]);
        }
        ip(&format!("link set {down} up"));
        let start = Instant::now();
        while !b.gets_one(&a, &one) {
            assert!(start.elapsed() < PATIENCE, "nothing arrives after {down}");
        }
        while !b.take().is_empty() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn threads_send_while_another_one_receives() {
    if !inside("threads_send_while_another_one_receives") {
        return;
    }
    let a = End::open("a0", Numbers::AllButZero);
    let mut b = End::open("b0", Numbers::AllButZero);
    let (threads, count) = (4, 200);
    let of_thread = |thread: usize| -> Vec<Vec<u8>> {
        let seeds = (0..count).map(|n| thread * 1000 + n);
        seeds.map(|seed| frame(&b, &a, 4200, seed)).collect()
    };
    let all: Vec<Vec<Vec<u8>>> = (0..threads).map(of_thread).collect();
    std::thread::scope(|scope| {
        for frames in &all {
            let a = &a;
            // With pauses: no lost frame is sent again here.
            scope.spawn(move || {
                for some in frames.chunks(10) {
                    send(a, some);
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
        }
        let mut got = b.expect(threads * count);
        let mut expected: Vec<Vec<u8>> = all.iter().flatten().cloned().collect();
        got.sort();
        expected.sort();
        assert!(got == expected);
    });
}

#[test]
fn a_socket_without_frames_uses_no_time() {
    if !inside("a_socket_without_frames_uses_no_time") {
        return;
    }
    let b = End::open("b0", Numbers::AllButZero);
    let start = thread_cpu_time();
    let mut ready = Vec::new();
    let wait = Some(Duration::from_millis(500));
    b.poller.wait(&mut ready, wait).expect("a wait");
    assert_eq!(ready, []);
    let used = thread_cpu_time() - start;
    assert!(used < Duration::from_millis(5), "{used:?}");
}

#[test]
fn a_process_without_the_right_learns_what_it_needs() {
    let test = "a_process_without_the_right_learns_what_it_needs";
    if std::env::var_os(INSIDE).is_none() {
        run(test, "-Urn", "", "exec \"$@\"");
        return;
    }
    let error = End::try_open("a0", Numbers::AllButZero).err();
    let error = error.expect("it is refused");
    assert!(matches!(error, XdpError::Denied(_)), "{error}");
    let text = error.to_string();
    assert!(text.contains("CAP_NET_ADMIN"), "{text}");
    assert!(text.contains("a0"), "{text}");
}

#[test]
fn too_little_memory_that_may_be_locked_is_named() {
    let start = "ulimit -l 64 && exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock \"$@\"";
    if !inside_with("too_little_memory_that_may_be_locked_is_named", "", start) {
        return;
    }
    let error = End::try_open("a0", Numbers::AllButZero).err();
    let error = error.expect("it is refused");
    assert!(matches!(error, XdpError::Memory { .. }), "{error}");
    assert!(error.to_string().contains("ulimit -l"), "{error}");
}

#[test]
fn the_driver_is_asked_before_its_interface_is_touched() {
    if !inside("the_driver_is_asked_before_its_interface_is_touched") {
        return;
    }
    assert!(!XdpSocket::may_be_zero_copy("a0", 9000));
    assert!(!XdpSocket::may_be_zero_copy("nowhere0", 9000));
}

#[test]
fn an_interface_below_another_one_is_refused() {
    let start = "ip link add link a0 name a1 type macvlan mode passthru && exec \"$@\"";
    if !inside_with("an_interface_below_another_one_is_refused", "", start) {
        return;
    }
    let error = End::try_open("a0", Numbers::AllButZero).err();
    let error = error.expect("it is refused");
    assert!(matches!(error, XdpError::Stacked { .. }), "{error}");
    assert!(error.to_string().contains("a1"), "{error}");
    End::open("b0", Numbers::AllButZero);
}
