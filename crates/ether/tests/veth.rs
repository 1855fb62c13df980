//! A target and initiators on a pair of virtual Ethernet interfaces, in a network namespace that this test makes. Runs without root,
//! and as root with XDP sockets, too.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jericho_ether::{
    AttachConfig, AttachError, Client, Key, LinkChoice, Mode, RemoteDevice, Scheduler, Security,
    ServeConfig, Server, discover, null_device,
};
use jericho_storage::{Device, OpenOptions, open_device};
use jericho_sys::affinity;
use jericho_sys::packet::{Frames, PacketSocket};
use jericho_sys::process::effective_uid;
use jericho_sys::xdp::{Numbers, Selection, XdpError, XdpSocket};
use jericho_topology::Topology;

const INSIDE: &str = "JERICHO_TEST_INSIDE";
const PAGE: usize = 4096;

/// Runs a test again in a network namespace with two pairs of joined interfaces, t0 and i0, t1 and i1: with packet sockets, then with XDP sockets if
/// this process may use them. Returns whether this process is inside.
fn inside(test: &str) -> bool {
    match std::env::var(INSIDE).as_deref() {
        Err(_) => {}
        Ok("xdp") => return has_xdp(test),
        Ok(_) => return true,
    }
    run_inside(test, "-Urn", "packet");
    match is_root() {
        // Without a user namespace: in one, no process may load programs.
        true => run_inside(test, "-n", "xdp"),
        false => eprintln!("skipped: {test} over XDP needs root"),
    }
    false
}

fn run_inside(test: &str, namespaces: &str, link: &str) {
    let me = std::env::current_exe().expect("this program");
    let script = "ip link add t0 mtu 9000 type veth peer name i0 mtu 9000 && ip link set t0 up && ip link set i0 up && ip link add t1 mtu 9000 type veth peer name i1 mtu 9000 && ip link set t1 up && ip link set i1 up && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args([namespaces, "sh", "-c", script, "sh"]);
    command.arg(me).args([test, "--exact", "--nocapture"]);
    let status = command.env(INSIDE, link).arg0("unshare").status();
    assert!(
        status.expect("unshare(1) of util-linux").success(),
        "{test} failed inside, with {link} sockets"
    );
}

/// Returns whether this process is root, and not only in a user namespace.
fn is_root() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    effective_uid() == 0 && map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Returns whether the kernel lets this process use XDP sockets.
fn has_xdp(test: &str) -> bool {
    let selection = Selection {
        ethertype: 0x88B7,
        flags_at: 15,
        flags_mask: 0,
        flags: 0,
        number_at: 16,
        numbers: Numbers::Listed,
    };
    match XdpSocket::open("t1", ([2; 6], 9000), &selection, None) {
        Err(error @ (XdpError::Denied(_) | XdpError::Kernel { .. })) => {
            eprintln!("skipped: {test} over XDP: {error}");
            false
        }
        _ => true,
    }
}

/// Returns the sockets of this run of the test.
fn link() -> LinkChoice {
    match std::env::var(INSIDE).as_deref() {
        Ok("xdp") => LinkChoice::Xdp,
        _ => LinkChoice::Packet,
    }
}

fn serve(device: Arc<dyn Device>, state: Option<&Path>) -> Server {
    serve_with(device, state, Security::None)
}

/// Serves to the clients with the keys 1 and 2.
fn serve_with(device: Arc<dyn Device>, state: Option<&Path>, security: Security) -> Server {
    Server::start(device, &serve_config(state, security)).expect("a server")
}

fn serve_config(state: Option<&Path>, security: Security) -> ServeConfig {
    let client = |number| Client {
        id: format!("client {number}"),
        key: Key::new([number; 32]),
    };
    ServeConfig {
        host: "hostb".into(),
        name: "data".into(),
        interfaces: vec!["t0".into()],
        ethertype: 0x88B5,
        link: link(),
        is_read_only: false,
        is_hidden: false,
        security,
        clients: [1, 2].map(client).to_vec(),
        topology: topology(),
        mode: Mode::default(),
        state: state.map(Path::to_path_buf),
    }
}

fn topology() -> Arc<Topology> {
    Arc::new(Topology::detect().expect("the nodes of this machine"))
}

fn config() -> AttachConfig {
    AttachConfig {
        remote: "tyche://hostb/data".parse().expect("a name"),
        interfaces: vec!["i0".into()],
        ethertype: 0x88B5,
        link: link(),
        take_over: false,
        replay: true,
        patience: Duration::from_secs(10),
        dead_after: None,
        read_only: false,
        key: None,
        scheduler: Scheduler::Affinity,
        channels: 1,
        mode: Mode::default(),
        batches: true,
        topology: topology(),
    }
}

fn attach() -> Arc<RemoteDevice> {
    RemoteDevice::attach(&config()).expect("a device")
}

fn file(dir: &Path, size: u64) -> Arc<dyn Device> {
    let options = OpenOptions {
        create_size: Some(size),
        ..OpenOptions::default()
    };
    open_device(&dir.join("disk"), options).expect("a file")
}

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut random = jericho_sim::Random::new(seed);
    let words = (0..length / 8).flat_map(|_| random.next_u64().to_le_bytes());
    words.collect()
}

#[test]
fn what_is_written_by_the_initiator_is_on_the_targets_file() {
    if !inside("what_is_written_by_the_initiator_is_on_the_targets_file") {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let disk = file(dir.path(), 64 << 20);
    let _server = serve(Arc::clone(&disk), Some(dir.path()));
    let device = attach();
    assert_eq!(device.size_bytes(), 64 << 20);
    let big = pattern(1, 40 << 20);
    device.write_at(8 << 20, &big).expect("a write of 40 MiB");
    let network = device.network().expect("its network");
    let channel = &network.channels[0];
    assert!(channel.is_up && channel.nic == "i0", "{network:?}");
    // 40 MiB in frames of 8 KiB.
    assert!(channel.sent_frames >= 5120, "{network:?}");
    assert!(
        channel.local_bytes + channel.remote_bytes >= 40 << 20,
        "{network:?}"
    );
    assert!(network.locks[0].acquisitions > 0, "{network:?}");
    device
        .write_durable(0, &pattern(2, PAGE))
        .expect("a durable write");
    device.write_zeros(16 << 20, 1 << 20).expect("zeros");
    device.flush().expect("a flush");
    let mut expected = big.clone();
    expected[8 << 20..9 << 20].fill(0);
    for source in [device.clone() as Arc<dyn Device>, disk] {
        let mut read = vec![0; 40 << 20];
        source.read_at(8 << 20, &mut read).expect("a read");
        assert!(read == expected, "{}", source.name());
        source.read_at(0, &mut read[..PAGE]).expect("a read");
        assert!(read[..PAGE] == pattern(2, PAGE));
    }
    device.discard(0, 1 << 20).expect("a discard");
    assert!(device.read_at(64 << 20, &mut [0; PAGE]).is_err());
    assert!(device.read_at(7, &mut [0; PAGE]).is_err());
}

#[test]
fn a_device_is_used_with_the_key_of_a_client_only() {
    if !inside("a_device_is_used_with_the_key_of_a_client_only") {
        return;
    }
    for security in [Security::Mac, Security::Encrypt] {
        let dir = tempfile::tempdir().expect("a directory");
        let disk = file(dir.path(), 64 << 20);
        let server = serve_with(Arc::clone(&disk), Some(dir.path()), security);
        let with = |number: Option<u8>| AttachConfig {
            key: number.map(|number| Key::new([number; 32])),
            ..config()
        };
        for (number, errno) in [(None, "--key"), (Some(3), "--client")] {
            let error = RemoteDevice::attach(&with(number)).err().expect("refused");
            assert!(error.to_string().contains(errno), "{error}");
        }
        let device = RemoteDevice::attach(&with(Some(1))).expect("a device");
        let big = pattern(1, 40 << 20);
        device.write_at(8 << 20, &big).expect("a write of 40 MiB");
        device.flush().expect("a flush");
        // The target restarts: new channels and new keys.
        drop(server);
        let _server = serve_with(Arc::clone(&disk), Some(dir.path()), security);
        for source in [device.clone() as Arc<dyn Device>, disk] {
            let mut read = vec![0; 40 << 20];
            source.read_at(8 << 20, &mut read).expect("a read");
            assert!(read == big, "{}", source.name());
        }
        let status = device.describe();
        assert!(status.contains(&security.to_string()), "{status}");
        drop(device);
        RemoteDevice::attach(&with(Some(2))).expect("the next client");
    }
}

#[test]
fn threads_use_a_device_at_the_same_time() {
    if !inside("threads_use_a_device_at_the_same_time") {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(file(dir.path(), 64 << 20), Some(dir.path()));
    let device = attach();
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let device = &device;
            scope.spawn(move || {
                let own = (thread as usize) << 23;
                for round in 0..200 {
                    let at = (own + (round as usize * 7 % 100) * PAGE) as u64;
                    let bytes = pattern(thread << 32 | round, PAGE * (1 + round as usize % 5));
                    device.write_at(at, &bytes).expect("a write");
                    if round % 20 == 0 {
                        device.flush().expect("a flush");
                    }
                    let mut read = vec![0; bytes.len()];
                    device.read_at(at, &mut read).expect("a read");
                    assert!(read == bytes);
                }
            });
        }
    });
}

/// Two virtual nodes with an interface each: requests of a thread use the interface of the node on which it runs.
#[test]
fn requests_use_the_interface_of_their_threads_node() {
    if !inside("requests_use_the_interface_of_their_threads_node") {
        return;
    }
    let cpus = affinity::get(None).expect("the CPUs");
    let [first, .., last] = cpus[..] else {
        eprintln!("skipped: this test needs two CPUs");
        return;
    };
    let dir = tempfile::tempdir().expect("a directory");
    let spec = dir.path().join("nodes");
    let lines = format!("node 0 cpus={first}\nnode 1 cpus={last}\nnic i0 node=0\nnic i1 node=1\n");
    std::fs::write(&spec, lines).expect("a file");
    let topology = Topology::from_spec(spec.to_str().expect("a path")).expect("a topology");
    let mut serve = serve_config(Some(dir.path()), Security::None);
    serve.interfaces.push("t1".into());
    let _server = Server::start(file(dir.path(), 64 << 20), &serve).expect("a server");
    let config = AttachConfig {
        interfaces: vec!["i0".into(), "i1".into()],
        topology: Arc::new(topology),
        channels: 2,
        ..config()
    };
    let device = RemoteDevice::attach(&config).expect("a device");
    let channels = || device.network().expect("its network").channels;
    let start = Instant::now();
    while channels().len() != 4 || !channels().iter().all(|channel| channel.is_up) {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{:?}",
            channels()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    for (cpu, nic) in [(first, "i0"), (last, "i1")] {
        affinity::set(None, &[cpu]).expect("a CPU");
        // A target that gets no CPU for long does not answer, and other interfaces carry its requests meanwhile.
        let (before, after) = loop {
            assert!(start.elapsed() < Duration::from_secs(60), "frames are lost");
            let before = channels();
            for at in 0..64 {
                device
                    .write_at(at << 16, &pattern(at, 1 << 16))
                    .expect("a write");
                device.read_at(at << 16, &mut [0; 1 << 16]).expect("a read");
            }
            let after = channels();
            let mut both = before.iter().zip(&after);
            if both.all(|(before, after)| before.lost_frames == after.lost_frames) {
                break (before, after);
            }
        };
        for (before, after) in before.iter().zip(after) {
            let sent_bytes = after.local_bytes - before.local_bytes;
            assert_eq!(after.remote_bytes, before.remote_bytes);
            // Two channels of one interface share the 4 MiB.
            assert_eq!(
                sent_bytes > 1 << 20,
                after.nic == nic,
                "{sent_bytes} {after:?}"
            );
        }
    }
}

#[test]
fn a_target_that_was_restarted_gets_what_it_may_have_lost() {
    if !inside("a_target_that_was_restarted_gets_what_it_may_have_lost") {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let disk = file(dir.path(), 64 << 20);
    let server = serve(Arc::clone(&disk), Some(dir.path()));
    let device = attach();
    let bytes = pattern(3, 1 << 20);
    device.write_at(0, &bytes).expect("a write");
    drop(server);
    // A reset of the host would have lost this.
    disk.write_at(0, &vec![0; 1 << 20]).expect("a write");
    let _server = serve(disk, Some(dir.path()));
    let mut read = vec![0; 1 << 20];
    device.read_at(0, &mut read).expect("a read");
    assert!(read == bytes);
    assert!(device.replayed() > 0);
    device.flush().expect("a flush");
}

#[test]
fn a_second_client_and_a_missing_target_are_named() {
    if !inside("a_second_client_and_a_missing_target_are_named") {
        return;
    }
    let missing = AttachConfig {
        patience: Duration::from_millis(100),
        ..config()
    };
    let error = RemoteDevice::attach(&missing).err().expect("no target");
    assert!(matches!(error, AttachError::Missing { .. }), "{error}");
    let _server = serve(null_device(1 << 30), None);
    let device = attach();
    let error = RemoteDevice::attach(&config()).err().expect("in use");
    assert!(matches!(error, AttachError::Busy(_)), "{error}");
    // After its end the next one gets it at once.
    drop(device);
    let begun = Instant::now();
    let device = attach();
    assert!(begun.elapsed() < Duration::from_secs(5));
    device.flush().expect("a flush");
    if link() == LinkChoice::Xdp {
        // An interface has one XDP program.
        let other = AttachConfig {
            remote: "tyche://hostb/other".parse().expect("a name"),
            ..config()
        };
        let error = RemoteDevice::attach(&other).err().expect("in use");
        assert!(error.to_string().contains("--link packet"), "{error}");
    }
    let other = AttachConfig {
        remote: "tyche://hostb/other".parse().expect("a name"),
        link: LinkChoice::Packet,
        patience: Duration::from_millis(100),
        ..config()
    };
    let error = RemoteDevice::attach(&other).err().expect("no such export");
    assert!(matches!(error, AttachError::Missing { .. }), "{error}");
    let lost = AttachConfig {
        interfaces: vec!["nothing0".into()],
        ..other
    };
    let error = RemoteDevice::attach(&lost).err().expect("no interface");
    assert!(error.to_string().contains("nothing0"), "{error}");
}

#[test]
fn interfaces_are_used_by_one_target_and_named_once() {
    if !inside("interfaces_are_used_by_one_target_and_named_once") {
        return;
    }
    let _server = serve(null_device(1 << 30), None);
    let mut config = ServeConfig {
        mode: Mode::default(),
        host: "hostb".into(),
        name: "other".into(),
        interfaces: vec!["t0".into()],
        ethertype: 0x88B5,
        link: link(),
        is_read_only: false,
        is_hidden: false,
        security: Security::None,
        clients: Vec::new(),
        topology: topology(),
        state: None,
    };
    let refused = |config: &ServeConfig| {
        let error = Server::start(null_device(1 << 30), config).err();
        error.expect("it is refused").to_string()
    };
    assert!(refused(&config).contains("--ethertype"));
    config.ethertype = 0x88B6;
    config.interfaces.push("t0".into());
    assert!(refused(&config).contains("twice"));
    // Both ends on one interface: each ignores the frames of its own side. Where the first one has an XDP socket, the second one has a packet socket.
    config.interfaces = vec!["i0".into()];
    config.link = LinkChoice::Packet;
    let _other = Server::start(null_device(1 << 20), &config).expect("a server");
    let device = attach();
    let mut attach = self::config();
    attach.remote = "tyche://hostb/other".parse().expect("a name");
    attach.interfaces = vec!["t0".into()];
    attach.link = LinkChoice::Packet;
    attach.ethertype = 0x88B6;
    let other = RemoteDevice::attach(&attach).expect("a device");
    // A question on the interface of both.
    let found = discover(&["i0".into()], 0x88B5, Duration::from_millis(300));
    assert_eq!(found.expect("an answer").len(), 1);
    for _ in 0..100 {
        device.write_at(0, &pattern(1, 1 << 16)).expect("a write");
        other.write_at(0, &pattern(1, 1 << 16)).expect("a write");
    }
}

/// Packet sockets see all frames that reach the kernel's network stack.
#[test]
fn xdp_takes_the_frames_of_sessions_and_no_others() {
    if !inside("xdp_takes_the_frames_of_sessions_and_no_others") {
        return;
    }
    let observe = |interface| PacketSocket::open(interface, 0x88B5, 8 << 20).expect("a socket");
    let observers = [observe("t0"), observe("i0")];
    let _server = serve(null_device(1 << 30), None);
    let device = attach();
    for _ in 0..100 {
        device.write_at(0, &pattern(1, PAGE)).expect("a write");
        device.read_at(0, &mut [0; PAGE]).expect("a read");
    }
    for observer in &observers {
        let mut frames = Frames::new(512, 9018);
        observer.receive_many(&mut frames).expect("frames");
        let count = frames.iter().count();
        match link() {
            // HELLO or OFFER, and perhaps repetitions.
            LinkChoice::Xdp => assert!((1..10).contains(&count), "{count}"),
            _ => assert!(count >= 200, "{count}"),
        }
    }
}

/// A device without I/O is served without a hand-over, so it is not slower than a file. Its completions must not wait for a timer.
#[test]
fn a_device_without_io_answers_at_once() {
    if !inside("a_device_without_io_answers_at_once") {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let time = |device: Arc<dyn Device>, state| {
        let _server = serve(device, state);
        let device = attach();
        let start = Instant::now();
        for at in 0..500 {
            let at = at * PAGE as u64;
            device.read_at(at, &mut [0; PAGE]).expect("a read");
        }
        start.elapsed()
    };
    let rounds = (0..3).map(|_| {
        let with_io = time(file(dir.path(), 64 << 20), Some(dir.path()));
        let without = time(null_device(64 << 20), None);
        (
            without.as_secs_f64() / with_io.as_secs_f64(),
            without,
            with_io,
        )
    });
    let rounds: Vec<_> = rounds.collect();
    assert!(rounds.iter().any(|round| round.0 < 1.5), "{rounds:?}");
}

#[test]
fn a_read_only_export_refuses_changes() {
    if !inside("a_read_only_export_refuses_changes") {
        return;
    }
    let config = ServeConfig {
        mode: Mode::default(),
        host: "hostb".into(),
        name: "data".into(),
        interfaces: vec!["t0".into()],
        ethertype: 0x88B5,
        link: link(),
        is_read_only: true,
        is_hidden: false,
        security: Security::None,
        clients: Vec::new(),
        topology: topology(),
        state: None,
    };
    let _server = Server::start(null_device(1 << 20), &config).expect("a server");
    let device = attach();
    assert!(device.is_read_only());
    device.read_at(0, &mut [1; PAGE]).expect("a read");
    let refused = [
        device.write_at(0, &[1; PAGE]),
        device.write_zeros(0, PAGE as u64),
        device.discard(0, PAGE as u64),
    ];
    let erofs = 30;
    assert!(
        refused
            .into_iter()
            .all(|result| result.unwrap_err().errno() == erofs)
    );
}

/// Returns the CPU time that the threads of both sides have used, in all.
fn cpu_time() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    let mut sum_ns = 0;
    for task in tasks {
        let path = task.expect("a thread").path();
        let read = |file: &str| std::fs::read_to_string(path.join(file)).unwrap_or_default();
        let name = read("comm");
        if ["serve", "remote", "send"]
            .iter()
            .any(|start| name.starts_with(start))
        {
            let schedstat = read("schedstat");
            let on_cpu = schedstat.split_whitespace().next().map(str::parse::<u64>);
            sum_ns += on_cpu.and_then(Result::ok).unwrap_or(0);
        }
    }
    Duration::from_nanos(sum_ns)
}

#[test]
fn threads_without_work_use_no_cpu() {
    if !inside("threads_without_work_use_no_cpu") {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    for state in [None, Some(dir.path())] {
        let _server = serve(null_device(1 << 30), state);
        let device = attach();
        device.write_at(0, &pattern(1, 1 << 20)).expect("it writes");
        device.flush().expect("it flushes");
        assert!(cpu_time() > Duration::ZERO);
        // Acknowledgements and the last timers may still be due.
        let interval = Duration::from_millis(500);
        let is_quiet = (0..20).any(|_| {
            let before = cpu_time();
            std::thread::sleep(interval);
            cpu_time() - before < interval / 200
        });
        assert!(is_quiet, "threads use CPU without work");
    }
}
