//! Reads and writes a remote device from several threads, and prints operations a second.
//! The file of the key is $JERICHO_KEY, if it is set.
//! Usage: throughput INTERFACE tyche://HOST/NAME read|write BYTES THREADS SECONDS

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jericho_ether::{AttachConfig, LinkChoice, Mode, RemoteDevice, Scheduler, read_key};
use jericho_storage::Device;
use jericho_topology::Topology;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [interface, url, what, bytes, threads, seconds] = &arguments[..] else {
        return Err(
            "arguments: INTERFACE tyche://HOST/NAME read|write BYTES THREADS SECONDS".into(),
        );
    };
    let (bytes, threads, seconds): (usize, u64, f64) =
        (bytes.parse()?, threads.parse()?, seconds.parse()?);
    let device = RemoteDevice::attach(&AttachConfig {
        remote: url.parse()?,
        interfaces: interface.split(',').map(str::to_owned).collect(),
        ethertype: 0x88B5,
        link: LinkChoice::Auto,
        take_over: false,
        replay: true,
        patience: Duration::from_secs(10),
        dead_after: None,
        read_only: false,
        scheduler: Scheduler::Affinity,
        channels: 1,
        batches: std::env::var_os("JERICHO_NO_BATCHES").is_none(),
        mode: match std::env::var("JERICHO_MODE").as_deref() {
            Ok("inline") => Mode::Inline,
            Ok("queue") => Mode::Queue,
            _ => Mode::Auto,
        },
        topology: Arc::new(Topology::detect()?),
        key: match std::env::var_os("JERICHO_KEY") {
            Some(file) => Some(read_key(file.as_ref())?),
            None => None,
        },
    })?;
    let (ends, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let blocks = device.size_bytes() / bytes as u64;
    let start = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (device, ends, done, what) = (&device, &ends, &done, what.as_str());
            scope.spawn(move || {
                let mut buffer = vec![thread as u8; bytes];
                let mut block = thread * 7919;
                while !ends.load(Ordering::Relaxed) {
                    // Threads stay apart: overlapping writes would wait for each other.
                    block = (block + threads) % (blocks / threads * threads);
                    let at = block * bytes as u64;
                    let result = match what {
                        "read" => device.read_at(at, &mut buffer),
                        _ => device.write_at(at, &buffer),
                    };
                    if let Err(error) = result {
                        eprintln!("{error}");
                        return;
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        std::thread::sleep(Duration::from_secs_f64(seconds));
        ends.store(true, Ordering::Relaxed);
    });
    let rate = done.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64();
    println!(
        "{what} {bytes} x {threads}: {rate:.0}/s, {:.0} MB/s, {:.1} us each",
        rate * bytes as f64 / 1e6,
        threads as f64 * 1e6 / rate
    );
    for lock in device.network().map_or(Vec::new(), |network| network.locks) {
        let each = |total: u64, count: u64| total as f64 / count.max(1) as f64;
        println!(
            "  {}: {} acquired, wait {:.2} us each, held {:.2} us",
            lock.name,
            lock.acquisitions,
            each(lock.wait_us, lock.acquisitions),
            lock.hold_mean_ns as f64 / 1e3
        );
    }
    Ok(())
}
