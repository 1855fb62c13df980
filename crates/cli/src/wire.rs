//! `jericho wire`: forwards frames between two network interfaces, and spoils some.

use std::io;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use jericho_badlink::{Counts, Faults};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::low_level::pipe;

use crate::args::WireArgs;
use crate::failure::{Context, Failure, Outcome, print};
use crate::forward::{Bells, Forwarder};
use crate::{logging, notify};

pub fn run(args: &WireArgs) -> Outcome {
    logging::start();
    let (a, b) = (&*args.a, &*args.b);
    // Before the command is ready: a signal from then on has its effect.
    let bells = bells().context("cannot listen for signals")?;
    let same = || {
        Failure::new(format!(
            "{a} and {b} are the same network interface: name two; `ip link` shows them"
        ))
    };
    if a == b {
        return Err(same());
    }
    let faults = Faults {
        loss: args.loss,
        reorder: args.reorder,
        reorder_by: args.reorder_by,
        duplicate: args.duplicate,
        corrupt: args.corrupt,
        delay: args.delay,
        cut: args.cut,
    };
    let forwarder =
        Forwarder::open([a, b], args.seed, faults).map_err(|e| Failure::new(e.to_string()))?;
    let [first, second] = forwarder.indices();
    // An interface can have several names.
    if first == second {
        return Err(same());
    }
    warn_of_mtus([a, b], forwarder.mtus());
    let status = format!("forwarding between {a} and {b} with seed {}", args.seed);
    print(&format!("{status}\n"))?;
    notify::ready(&status);
    let [forth, back] = forwarder.run(&bells).context("cannot wait for frames")?;
    print(&format!(
        "{}{}",
        line_of(a, b, &forth),
        line_of(b, a, &back)
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Makes signals ring.
fn bells() -> io::Result<Bells> {
    let (cut, rings_cut) = UnixStream::pair()?;
    let (end, rings_end) = UnixStream::pair()?;
    cut.set_nonblocking(true)?;
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        pipe::register(signal, rings_end.try_clone()?)?;
    }
    pipe::register(SIGUSR1, rings_cut)?;
    Ok(Bells { cut, end })
}

fn warn_of_mtus([a, b]: [&str; 2], [mtu_a, mtu_b]: [usize; 2]) {
    if mtu_a == mtu_b {
        return;
    }
    let (from, to, mtu) = match mtu_a > mtu_b {
        true => (a, b, mtu_b),
        false => (b, a, mtu_a),
    };
    tracing::warn!(
        "the MTU of {a} is {mtu_a}, that of {b} is {mtu_b}: frames from {from} to {to} with more than {mtu} bytes after their Ethernet header do not pass"
    );
}

/// Returns a line about the frames of a direction.
fn line_of(from: &str, to: &str, counts: &Counts) -> String {
    let Counts {
        forwarded,
        lost,
        reordered,
        duplicated,
        corrupted,
        cut,
        dropped,
    } = counts;
    format!(
        "{from} to {to}: {forwarded} forwarded, {lost} lost, {reordered} reordered, {duplicated} duplicated, {corrupted} corrupted, {cut} cut, {dropped} dropped\n"
    )
}
