//! Runs `jericho` in a network namespace of its own.

use std::process::Command;

use super::support::jericho;

/// Makes interfaces t0 and i0 that are joined.
pub const JOINED: &str = "ip link add t0 mtu 9000 type veth peer name i0 mtu 9000 && ip link set t0 up && ip link set i0 up";

/// Returns `jericho` with arguments, in a network namespace of its own after some set-up.
pub fn inside(setup: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    let script = format!("{setup}; exec \"$@\"");
    command.args(["-Urn", "sh", "-c", &script, "sh"]);
    command.arg(jericho(["x"]).get_program()).args(arguments);
    command
}

/// Returns the set-up that takes the right to use packet sockets away after another one.
pub fn without_net_raw(setup: &str) -> String {
    format!("{setup}; exec setpriv --bounding-set=-net_raw --inh-caps=-net_raw \"$@\"")
}
