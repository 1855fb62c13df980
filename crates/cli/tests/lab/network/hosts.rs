//! The two hosts: their interfaces, and the target's process.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use jericho_ether::{AttachConfig, ETHERTYPE, LinkChoice, Mode, RemoteDevice, Scheduler};
use jericho_topology::Topology;

use crate::commands::succeed;

/// The nodes. Node 0 has the CPUs 0 and 2, and node 1 has 1 and 3.
pub const NODES: usize = 2;
/// Pairs of interfaces: the initiator's `iN` is joined to the target's `tN`. Three are on each node.
pub const PAIRS: usize = 6;
/// Where a target writes its log.
const LOG: &str = "/tmp/target.log";

/// Returns the node of a CPU.
pub fn node_of_cpu(cpu: usize) -> usize {
    cpu % NODES
}

/// Returns the CPUs of a node.
pub fn cpus_of(node: usize) -> Vec<u32> {
    vec![node as u32, (node + NODES) as u32]
}

/// Returns the node of both interfaces of a pair.
pub fn node_of_pair(pair: usize) -> usize {
    pair / 3
}

/// The numbers of pairs of interfaces that a case uses: on node 0, and on node 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout(pub usize, pub usize);

/// The paper's configurations of interfaces.
pub const LAYOUTS: [Layout; 3] = [Layout(3, 0), Layout(3, 1), Layout(3, 3)];

impl Layout {
    pub fn pairs(self) -> Vec<usize> {
        (0..self.0).chain(3..3 + self.1).collect()
    }

    /// Returns how many pairs a node has.
    pub fn of(self, node: usize) -> usize {
        [self.0, self.1][node]
    }

    /// Returns the nodes that have interfaces.
    pub fn nodes(self) -> Vec<usize> {
        (0..NODES).filter(|node| self.of(*node) > 0).collect()
    }

    /// Returns the interfaces of a host, whose names begin with `i` or `t`.
    pub fn interfaces(self, host: char) -> Vec<String> {
        self.pairs()
            .iter()
            .map(|pair| format!("{host}{pair}"))
            .collect()
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}+{}", self.0, self.1)
    }
}

/// What Jericho is told of the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// What the kernel knows.
    Truth,
    /// Each interface is on the node on which it is not.
    Swapped,
    /// The machine has one node. Jericho then places nothing.
    OneNode,
}

impl Told {
    /// Returns the value of `--topology` for both hosts.
    pub fn spec(self) -> String {
        match self {
            Told::Truth => "auto".to_owned(),
            Told::OneNode => "virtual:1".to_owned(),
            Told::Swapped => {
                let nodes = (0..NODES).map(|node| {
                    format!(
                        "node {node} cpus={},{} kernel-node={node}\n",
                        node,
                        node + NODES
                    )
                });
                let interfaces = (0..PAIRS).flat_map(|pair| {
                    let node = NODES - 1 - node_of_pair(pair);
                    ['i', 't'].map(|host| format!("nic {host}{pair} node={node}\n"))
                });
                let path = "/tmp/swapped.topology";
                let text: String = nodes.chain(interfaces).collect();
                std::fs::write(path, text).expect("a topology file");
                path.to_owned()
            }
        }
    }

    /// Returns the node that Jericho takes for that of an interface on `node`.
    pub fn node(self, node: usize) -> Option<usize> {
        match self {
            Told::Truth => Some(node),
            Told::Swapped => Some(NODES - 1 - node),
            Told::OneNode => None,
        }
    }
}

/// A process `jericho serve` on the target. It is killed when dropped.
pub struct Target {
    process: Child,
}

impl Target {
    /// Serves a device as tyche://hostb/NAME.
    pub fn serve(device: &str, name: &str, layout: Layout, told: Told) -> Target {
        let log = File::options().create(true).append(true).open(LOG);
        let log = log.expect("a file for the log");
        let mut command = on_target("/usr/bin/jericho");
        command.args(["serve", device, "--name", name, "--host", "hostb"]);
        command.args(["--no-auth", "--state", "/tmp/owners"]);
        command.args(["--topology", &told.spec()]);
        command.args(["--nic", &layout.interfaces('t').join(",")]);
        command.stdout(Stdio::piped()).stderr(log);
        let mut process = command.spawn().expect("ip netns exec");
        let mut line = String::new();
        let output = process.stdout.take().expect("a pipe");
        BufReader::new(output).read_line(&mut line).expect("a line");
        if !line.starts_with("serving") {
            let log = std::fs::read_to_string(LOG).unwrap_or_default();
            panic!("the target said {line:?}\n{log}");
        }
        Target { process }
    }

    /// Returns the process id. `ip netns exec` has become the program.
    pub fn pid(&self) -> u64 {
        self.process.id().into()
    }

    /// Kills the process, as a crash of the host would.
    pub fn kill(mut self) {
        self.process.kill().expect("kill");
        self.process.wait().expect("wait");
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(LOG).unwrap_or_default();
            println!("the target's log:\n{log}");
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns a command that runs a program on the target.
pub fn on_target(program: &str) -> Command {
    let mut command = Command::new("/usr/bin/ip");
    command.args(["netns", "exec", "target", program]);
    command
}

/// Runs a program on the host with an interface. Returns its standard output.
pub fn on_host_of(interface: &str, words: &str) -> String {
    let mut words = words.split_whitespace();
    let program = words.next().expect("a program");
    let mut command = match interface.starts_with('t') {
        true => on_target(program),
        false => Command::new(program),
    };
    succeed(command.args(words))
}

/// Attaches the device tyche://hostb/NAME in this process.
pub fn attach(name: &str, layout: Layout, told: Told, scheduler: Scheduler) -> Arc<RemoteDevice> {
    attach_by(name, layout, told, (scheduler, Mode::default()))
}

/// Does the same, and says who sends frames.
pub fn attach_by(
    name: &str,
    layout: Layout,
    told: Told,
    (scheduler, mode): (Scheduler, Mode),
) -> Arc<RemoteDevice> {
    let config = AttachConfig {
        remote: format!("tyche://hostb/{name}").parse().expect("a name"),
        interfaces: layout.interfaces('i'),
        ethertype: ETHERTYPE,
        take_over: false,
        replay: true,
        patience: Duration::from_secs(30),
        dead_after: None,
        read_only: false,
        key: None,
        scheduler,
        mode,
        batches: true,
        link: LinkChoice::Packet,
        channels: 1,
        topology: Arc::new(Topology::from_spec(&told.spec()).expect("nodes")),
    };
    RemoteDevice::attach(&config).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the sysfs directory of an interface's PCI function, on its host.
pub fn pci_of(interface: &str) -> PathBuf {
    PathBuf::from(format!("/sys/class/net/{interface}/device/.."))
}
