//! The sides of the main table: clients with their targets, on one pair of interfaces.

use std::time::Duration;

use crate::Result;
use crate::remote::aoe::Aoe;
use crate::remote::check;
use crate::remote::client::Client;
use crate::remote::hosts::{Host, Running, run_words};
use crate::remote::jericho::Jericho;
use crate::remote::load::{self, Load, Reached};
use crate::remote::modes::{Behind, Mode};
use crate::remote::nbd::Nbd;
use crate::remote::plan::Plan;
use crate::remote::targets;
use crate::remote::usage::Usage;

/// Interface of the initiator.
pub const HERE: &str = "i0";
/// Interface of the targets.
pub const THERE: &str = "t0";
const ADDRESS_HERE: &str = "10.0.0.1";
const ADDRESS_THERE: &str = "10.0.0.2";

/// A client, and the target that it uses.
pub struct Pair {
    /// The client.
    pub client: Box<dyn Client>,
    /// The processes whose time counts.
    pub usage: Usage,
    _target: Running,
}

impl Pair {
    /// Makes a pair.
    pub fn new(client: Box<dyn Client>, target: Running) -> Pair {
        Pair {
            client,
            usage: Usage {
                targets: vec![target.pid()],
            },
            _target: target,
        }
    }

    /// Measures a load.
    pub fn measure(&mut self, load: &Load, time: Duration) -> Result<Reached> {
        load::measure(&mut *self.client, load, &self.usage, time)
    }
}

/// A side of the table: a client, under a setting of the interfaces.
pub struct Side {
    /// Its name.
    pub name: &'static str,
    /// The client's place in [`Sides::pairs`].
    pub pair: usize,
    /// Whether the kernel may pass TCP segments of 64 KiB from end to end.
    pub joins_segments: bool,
    /// Whether it is a mode of Jericho.
    pub is_ours: bool,
}

/// Clients, and the sides that they are on.
pub struct Sides {
    // Clients end before their targets, and targets before their host.
    /// The clients, with their targets.
    pub pairs: Vec<Pair>,
    /// The sides.
    pub sides: Vec<Side>,
    joins_segments: bool,
    /// Frames that the AoE target lets be in progress.
    pub aoe_window: usize,
    /// The other host.
    pub host: Host,
}

/// Switches on or off whether TCP segments of 64 KiB pass the interfaces in one piece (TSO and GSO). Without it, they pass as packets of
/// the MTU. Checksums are never computed, as with a network card, and GRO is off.
pub fn join_segments(host: &Host, here: &str, there: &str, on: bool) -> Result<()> {
    let state = if on { "on" } else { "off" };
    let features = format!("tso {state} gso {state} gro off");
    run_words(&format!("ethtool -K {here} {features}"))?;
    host.run(&format!("ethtool -K {there} {features}"))
}

/// Gives two interfaces addresses.
pub fn number(host: &Host, here: &str, there: &str) -> Result<()> {
    run_words(&format!("ip addr add {ADDRESS_HERE}/24 dev {here}"))?;
    host.run(&format!("ip addr add {ADDRESS_THERE}/24 dev {there}"))
}

/// Starts nbdkit at the address of the other host, and connects to it.
pub fn nbd(plan: &Plan, host: &Host) -> Result<Pair> {
    let (target, address) = targets::nbdkit(plan, host, ADDRESS_THERE)?;
    Ok(Pair::new(Box::new(Nbd::connect(address)?), target))
}

impl Sides {
    /// Starts all targets and attaches the clients. Checks that each client reads the bytes that it has written.
    pub fn new(plan: &Plan) -> Result<Sides> {
        let host = Host::of_targets(plan)?;
        host.join(HERE, THERE)?;
        number(&host, HERE, THERE)?;
        join_segments(&host, HERE, THERE, true)?;
        let (mut pairs, mut sides) = (Vec::new(), Vec::new());
        for mode in Mode::all() {
            let target = targets::jericho(plan, &host, &mode, &[THERE])?;
            let client = Jericho::attach(&mode.attach_config(&[HERE])?)?;
            let mut pair = Pair::new(Box::new(client), target);
            if mode.behind == Behind::Memory {
                prepare(mode.name, &mut pair)?;
            }
            sides.push(Side {
                name: mode.name,
                pair: pairs.len(),
                joins_segments: true,
                is_ours: true,
            });
            pairs.push(pair);
        }
        let mut pair = nbd(plan, &host)?;
        prepare("nbd", &mut pair)?;
        for (name, joins_segments) in [
            ("nbd, TSO and GSO on", true),
            ("nbd, TSO and GSO off", false),
        ] {
            sides.push(Side {
                name,
                pair: pairs.len(),
                joins_segments,
                is_ours: false,
            });
        }
        pairs.push(pair);
        let target = targets::vblade(plan, &host, THERE)?;
        let client = Aoe::connect(HERE, targets::AOE)?;
        let aoe_window = client.window();
        let mut pair = Pair::new(Box::new(client), target);
        prepare("aoe", &mut pair)?;
        sides.push(Side {
            name: "aoe",
            pair: pairs.len(),
            joins_segments: true,
            is_ours: false,
        });
        pairs.push(pair);
        Ok(Sides {
            pairs,
            sides,
            joins_segments: true,
            aoe_window,
            host,
        })
    }

    /// Starts targets with packet sockets and with XDP sockets, on a pair of interfaces each: an XDP program also changes how the frames of other sockets go.
    pub fn with_links(plan: &Plan) -> Result<Sides> {
        let host = Host::of_targets(plan)?;
        let (mut pairs, mut sides) = (Vec::new(), Vec::new());
        let interfaces = [(HERE, THERE), ("i1", "t1")];
        for (mode, (here, there)) in Mode::links().into_iter().zip(interfaces) {
            host.join(here, there)?;
            let target = targets::jericho(plan, &host, &mode, &[there])?;
            let client = Jericho::attach(&mode.attach_config(&[here])?)?;
            sides.push(Side {
                name: mode.name,
                pair: pairs.len(),
                joins_segments: true,
                is_ours: true,
            });
            pairs.push(Pair::new(Box::new(client), target));
        }
        Ok(Sides {
            pairs,
            sides,
            joins_segments: true,
            aoe_window: 0,
            host,
        })
    }

    /// Measures a load on a side.
    pub fn measure(&mut self, side: usize, load: &Load, time: Duration) -> Result<Reached> {
        let side = &self.sides[side];
        if side.joins_segments != self.joins_segments {
            join_segments(&self.host, HERE, THERE, side.joins_segments)?;
            self.joins_segments = side.joins_segments;
        }
        let measured = self.pairs[side.pair].measure(load, time);
        measured.map_err(|e| format!("{}: {}: {e}", side.name, load.name()).into())
    }

    /// Returns how often the client of each side sent something again.
    pub fn repetitions(&self) -> Vec<(&'static str, u64)> {
        let counted = self.sides.iter().filter_map(|side| {
            let count = self.pairs[side.pair].client.repetitions()?;
            Some((side.name, count))
        });
        counted.collect()
    }
}

/// Checks a client, and writes its device once, so that no read finds a hole.
fn prepare(name: &str, pair: &mut Pair) -> Result<()> {
    check::check(name, &mut *pair.client, 1)?;
    check::fill(&mut *pair.client)
}
