//! Network namespaces that stand in for hosts, and the processes in them.
//!
//! This process is in a namespace of its own already ([`enter`]), and is one host. Processes end when they are dropped, and all of them end
//! with this process: [`enter`] makes a PID namespace, too.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use jericho_sys::process::{Process, Signal};

use crate::Result;
use crate::remote::plan::Plan;

const INSIDE: &str = "JERICHO_BENCH_INSIDE";
/// How long a process may take to be ready.
const READY_WITHIN: Duration = Duration::from_secs(10);

/// Runs this program again with the same arguments, in namespaces of its own, with a filesystem in memory at `dir`. Returns whether this
/// process is inside already.
pub fn enter(dir: &Path) -> Result<bool> {
    if std::env::var_os(INSIDE).is_some() {
        return Ok(true);
    }
    let mut command = Command::new("unshare");
    if jericho_sys::process::effective_uid() != 0 {
        command.args(["--user", "--map-root-user"]);
    }
    command.args([
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]);
    // The shell is process 1, which ignores SIGINT: this program must not be. All others end with the shell.
    let script = "mount -t tmpfs bench \"$1\"; shift; ip link set lo up; \"$@\"; exit $?";
    command.args(["sh", "-c", script, "sh"]).arg(dir);
    command
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1));
    let failed = command.env(INSIDE, "1").exec();
    Err(format!("cannot run unshare(1): {failed}; install util-linux").into())
}

/// A process that is killed when it is dropped.
pub struct Running {
    child: Child,
}

impl Running {
    /// Returns its number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends the process in order.
    pub fn end(mut self) -> Result<()> {
        Process::open(self.child.id())?.send(Signal::Terminate)?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a command to its end.
pub fn run(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .map_err(|e| format!("cannot run {command:?}: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let why = String::from_utf8_lossy(&output.stderr);
            Err(format!("{command:?} failed: {}", why.trim()).into())
        }
    }
}

/// Runs a command whose words are separated by spaces.
pub fn run_words(words: &str) -> Result<()> {
    run(&mut words_of(words))
}

fn words_of(words: &str) -> Command {
    let mut words = words.split(' ');
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    command
}

/// Tries until `ready`, for at most ten seconds.
pub fn until(what: &str, mut ready: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + READY_WITHIN;
    while !ready()? {
        if Instant::now() > end {
            return Err(format!("{what} is not ready after {READY_WITHIN:?}").into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// A network namespace that a sleeping process keeps.
pub struct Host {
    keeper: Running,
    cpus: Option<String>,
    /// Interfaces here whose other end is on the host.
    joined: Mutex<Vec<String>>,
}

impl Drop for Host {
    /// Removes the host's interfaces. The kernel does so, too, but at any time after the end of the namespace. Until then the next host cannot
    /// have interfaces of these names.
    fn drop(&mut self) {
        // Poisoned only by a panic, which ends the run.
        for here in self.joined.get_mut().into_iter().flatten() {
            if let Err(error) = run_words(&format!("ip link del {here}")) {
                eprintln!("{error}");
            }
        }
    }
}

impl Host {
    /// Makes a namespace whose processes run on the CPU of the targets.
    pub fn of_targets(plan: &Plan) -> Result<Host> {
        Host::new(plan.pinning.map(|cpus| cpus.target.to_string()))
    }

    /// Makes a namespace whose processes run on all CPUs.
    pub fn anywhere() -> Result<Host> {
        let last = fs::read_to_string("/sys/devices/system/cpu/online")?;
        Host::new(Some(last.trim().to_owned()))
    }

    /// Makes a namespace whose processes run on a list of CPUs, or where this process does.
    fn new(cpus: Option<String>) -> Result<Host> {
        let mut command = words_of("unshare --net sleep infinity");
        let keeper = Running {
            child: command.stdin(Stdio::null()).spawn()?,
        };
        let theirs = format!("/proc/{}/ns/net", keeper.pid());
        let ours = fs::read_link("/proc/self/ns/net")?;
        until(
            "a network namespace",
            || Ok(fs::read_link(&theirs)? != ours),
        )?;
        let host = Host {
            keeper,
            cpus,
            joined: Mutex::default(),
        };
        host.run("ip link set lo up")?;
        Ok(host)
    }

    /// Returns a command that runs on this host.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.namespace()));
        if let Some(cpus) = &self.cpus {
            command.args(["taskset", "-c", cpus]);
        }
        command.arg(program).stdin(Stdio::null());
        command
    }

    /// Runs a command on this host to its end. Spaces separate its words.
    pub fn run(&self, words: &str) -> Result<()> {
        let mut words = words.split(' ');
        run(self.command(words.next().unwrap_or_default()).args(words))
    }

    /// Starts a command on this host. What it prints goes to a file.
    pub fn start(&self, command: &mut Command, log: &Path) -> Result<Running> {
        let file = fs::File::create(log)?;
        command.stdout(file.try_clone()?).stderr(file);
        let child = command
            .spawn()
            .map_err(|e| format!("cannot run {command:?}: {e}"))?;
        Ok(Running { child })
    }

    /// Joins an interface here with an interface of this host. Both are up, with an MTU of 9000.
    pub fn join(&self, here: &str, there: &str) -> Result<()> {
        run_words(&self.pair(here, there))?;
        self.joined
            .lock()
            .map_err(|_| "another thread has panicked")?
            .push(here.to_owned());
        run_words(&format!("ip link set {here} up"))?;
        self.run(&format!("ip link set {there} up"))
    }

    /// Joins an interface of this host with an interface of another one.
    pub fn join_to(&self, here: &str, other: &Host, there: &str) -> Result<()> {
        self.run(&other.pair(here, there))?;
        self.run(&format!("ip link set {here} up"))?;
        other.run(&format!("ip link set {there} up"))
    }

    /// Returns the command that makes a pair of interfaces, one of them on this host.
    fn pair(&self, other: &str, own: &str) -> String {
        let namespace = self.namespace();
        format!("ip link add {other} mtu 9000 type veth peer name {own} mtu 9000 netns {namespace}")
    }

    /// Returns the file of the namespace.
    pub fn namespace(&self) -> String {
        format!("/proc/{}/ns/net", self.keeper.pid())
    }
}
