//! The targets: `jericho serve`, nbdkit and vblade, each with a device in memory.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use jericho_ether::LinkChoice;

use crate::Result;
use crate::remote::aoe::Address;
use crate::remote::hosts::{Host, Running, until};
use crate::remote::modes::{Behind, Mode};
use crate::remote::plan::Plan;

/// Size of each device.
pub const DEVICE_BYTES: u64 = 1 << 30;
/// Shelf and slot of vblade.
pub const AOE: Address = Address { major: 7, minor: 1 };
const NBD_PORT: u16 = 10_809;

/// Starts `jericho serve` on interfaces of a host.
pub fn jericho(plan: &Plan, host: &Host, mode: &Mode, interfaces: &[&str]) -> Result<Running> {
    let file = plan.dir.join(format!("{}.disk", mode.name));
    let device = match mode.behind {
        Behind::Nothing => format!("null:{DEVICE_BYTES}"),
        Behind::Memory => {
            fs::File::create(&file)?.set_len(DEVICE_BYTES)?;
            file.display().to_string()
        }
    };
    let log = plan.dir.join(format!("{}.log", mode.name));
    let mut command = host.command(&plan.jericho.display().to_string());
    command.args(["serve", &device, "--name", mode.name, "--host", "hostb"]);
    command.args(["--nic", &interfaces.join(",")]);
    command.args(["--ethertype", &format!("{:#06x}", mode.ethertype)]);
    let link = match mode.link {
        LinkChoice::Auto => "auto",
        LinkChoice::Packet => "packet",
        LinkChoice::Xdp => "xdp",
    };
    command.args(["--link", link]);
    if mode.behind != Behind::Nothing {
        command.arg("--state").arg(plan.dir.join("state"));
    }
    command.args(mode.serve_options(&plan.dir)?);
    let running = host.start(&mut command, &log)?;
    let what = format!("jericho serve (its output is in {})", log.display());
    until(&what, || {
        Ok(fs::read_to_string(&log)?.contains("tyche://hostb/"))
    })?;
    Ok(running)
}

/// Starts nbdkit on a host at an address.
pub fn nbdkit(plan: &Plan, host: &Host, address: &str) -> Result<(Running, SocketAddr)> {
    let mut command = host.command("nbdkit");
    command.args([
        "--foreground",
        "--ipaddr",
        address,
        "--port",
        &NBD_PORT.to_string(),
    ]);
    command.args(["memory", &DEVICE_BYTES.to_string()]);
    let running = host.start(&mut command, &plan.dir.join("nbdkit.log"))?;
    let address = SocketAddr::new(address.parse()?, NBD_PORT);
    until("nbdkit", || {
        Ok(TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok())
    })?;
    Ok((running, address))
}

/// Starts vblade on an interface of a host.
pub fn vblade(plan: &Plan, host: &Host, interface: &str) -> Result<Running> {
    let file = plan.dir.join("aoe.disk");
    fs::File::create(&file)?.set_len(DEVICE_BYTES)?;
    let mut command = host.command("vblade");
    command
        .args([&AOE.major.to_string(), &AOE.minor.to_string(), interface])
        .arg(&file);
    host.start(&mut command, &plan.dir.join("vblade.log"))
}
