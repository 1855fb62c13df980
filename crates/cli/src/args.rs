//! The command line: a contract with scripts. Additions are fine; what is here stays.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use jericho_daemon::ThreadPolicy;
use jericho_fuse::Transport;

use crate::size;

/// A storage stack that keeps I/O threads, cache memory and devices on the same NUMA node.
#[derive(Parser, Debug)]
#[command(
    name = "jericho",
    version,
    about,
    propagate_version = true,
    after_help = "\
Examples:
  jericho format my.volume --size 1G        make a volume on an ordinary file
  jericho mount my.volume /mnt/jericho      use it
  jericho stat /mnt/jericho                 see its slices and hit counts
  jericho umount /mnt/jericho               everything is on the device when this returns

Exit status: 0 done, 1 not done (the message says why and what to do), 2 wrong usage."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Make a volume on files or block devices
    Format(FormatArgs),
    /// Mount a volume on a directory; returns once it serves
    Mount(MountArgs),
    /// Unmount; returns once everything is on the device
    Umount(UmountArgs),
    /// Write all data of mounted volumes to their devices, or say why that fails
    Sync(SyncArgs),
    /// Discard the free space of a mounted volume, so that its host or SSD gets it back
    Trim(TrimArgs),
    /// Run a command that reads and writes cached files without the kernel, perhaps on a mount for itself
    Run(RunArgs),
    /// Show the slices of a mounted volume and how often the cache was hit
    Stat(StatArgs),
    /// Show what a mounted volume is doing, live
    Top(TopArgs),
    /// Show where a file is: slice, home node, bytes in memory by node
    Where(WhereArgs),
    /// Show or set on which node files are placed
    Place(PlaceArgs),
    /// Check a volume that is not mounted
    Check(CheckArgs),
    /// Show the NUMA nodes that are used
    Topology(TopologyArgs),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
    /// Wait for the end of the daemon at the other end of standard input, then end programs' access to its cache
    #[command(hide = true)]
    Keeper,
    /// Write the manual pages into a directory, or print the main one
    Man(ManArgs),
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho format my.volume --size 1G
  jericho format /dev/nvme0n1 /dev/nvme1n1 --slices 4
  jericho format my.volume --size 512M --force     destroys what is in it

Each slice is placed on a device of its own node where there is one. A file that does not exist is
created with the given size. All of its space is allocated on the host now, unless --sparse is given. A block
device is used whole. When format refuses, it has changed nothing.")]
pub struct FormatArgs {
    /// First device of the volume: a file or a block device
    pub volume: PathBuf,
    /// Further devices
    pub device: Vec<PathBuf>,
    /// Size of each file, with K, M, G or T (powers of 1024)
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub size: Option<u64>,
    /// Allocate the space of files only as it is used, and discard what is freed (see trim). If the host becomes full,
    /// writes to the volume then fail [default: allocate all space now]
    #[arg(long)]
    pub sparse: bool,
    /// Number of slices [default: one per NUMA node]
    #[arg(long, value_name = "N")]
    pub slices: Option<u16>,
    /// Destroy what is on the devices
    #[arg(long)]
    pub force: bool,
    /// NUMA nodes: auto, virtual:N, or the path of a topology file
    #[arg(
        long,
        value_name = "SPEC",
        default_value = "auto",
        hide_default_value = true
    )]
    pub topology: String,
}

/// Options of a mount.
#[derive(Args, Clone, Debug)]
pub struct MountOptions {
    /// Memory for cached data, with K, M, G or T [default: an eighth of what may be used]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache: Option<u64>,
    /// NUMA nodes: auto, virtual:N, or the path of a topology file
    #[arg(long, value_name = "SPEC", default_value = "auto")]
    pub topology: String,
    /// When threads are moved to the data that they use: adaptive (when it is worth it), never, or
    /// always [default: adaptive]; directories can have their own (see place)
    #[arg(long, value_name = "POLICY")]
    pub placement: Option<ThreadPolicy>,
    /// How the kernel's requests come: auto (through its ring where it offers FUSE over io_uring, else by
    /// /dev/fuse), device, or ring
    #[arg(long, value_name = "TRANSPORT", default_value = "auto")]
    pub transport: Transport,
    /// Another user, or a group, whose programs may use the volume's cache directly under `jericho run` (repeat for
    /// several; :NAME is a group). Such a program can read and damage every cached byte of the volume, whatever the files'
    /// permissions say [default: the volume's owner and the user who mounts]
    #[arg(long, value_name = "USER|GROUP")]
    pub fast_path: Vec<String>,
    /// Change nothing
    #[arg(long)]
    pub read_only: bool,
    /// Where another device of the volume is, if it is not found by its label (may be given several times)
    #[arg(long, value_name = "PATH")]
    pub device: Vec<PathBuf>,
    /// Mount although another host has not unmounted the volume, or the file of a loop device cannot be locked
    #[arg(long)]
    pub force: bool,
    /// Where the background daemon writes its messages
    /// [default: /var/log/jericho/ for root, else ~/.local/state/jericho/]
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho mount my.volume /mnt/jericho
  jericho mount my.volume ~/mnt --cache 2G --topology virtual:4
  jericho mount /dev/nvme0n1 /srv/data --foreground        for a service manager

Runs as root (then for all users) or as an ordinary user (for that user; needs fusermount3). The
daemon unmounts cleanly on SIGTERM and SIGINT. With --foreground the daemon's messages go to standard error
(which systemd puts into the journal), and the daemon tells systemd when the mount serves. RUST_LOG chooses
what is logged (info; for example RUST_LOG=jericho_cache=debug).

make install puts helpers for mount(8) and umount(8) into /sbin. With them these mount, too:
  mount -t fuse.jericho VOLUME DIR -o cache=2G
  /srv/my.volume /mnt/jericho fuse.jericho cache=2G,nofail 0 0        a line of /etc/fstab
Their options are ro, force, cache=, topology=, placement=, transport=, fast-path=, device= and log=. umount(8) then does what
jericho umount does.")]
pub struct MountArgs {
    /// First device of the volume
    pub volume: PathBuf,
    /// An empty directory
    pub dir: PathBuf,
    #[command(flatten)]
    pub options: MountOptions,
    /// Serve in this process, in the foreground
    #[arg(long)]
    pub foreground: bool,
    /// This process is the daemon of another one, which waits for a line on our standard output.
    #[arg(long, hide = true)]
    pub report_to_parent: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Returns when all data is on the device and the volume is marked clean. On failure it prints a message and returns
status 1. If the mount is in use, it stays mounted, and the message names its users.

Everything is written back before the volume is unmounted. If that fails, as on a full device, the volume stays mounted.
Jericho cannot refuse umount(2) and fusermount3: after them the daemon stays, retries every second, names the unwritten
files in its log and holds the volume until all is written. A second SIGTERM or SIGINT to the daemon, or --force here,
discards what cannot be written. A SIGHUP does not.")]
pub struct UmountArgs {
    /// The directory; with --force also a volume without a mount that its daemon still writes back
    pub dir: PathBuf,
    /// Discard what cannot be written; the daemon's log names the files
    #[arg(long)]
    pub force: bool,
    /// Detach at once, even if the mount is in use or not all can be written; the daemon ends when no program uses it and all is written
    #[arg(long, conflicts_with = "force")]
    pub lazy: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho sync                    all volumes that are mounted
  jericho sync /mnt/jericho

Returns when everything written so far is durable, or with status 1 when that fails. The kernel does not forward sync(2)
and syncfs(2) to FUSE daemons: on the plain mount they only write mapped pages back. Under jericho run they do all that
this command does.")]
pub struct SyncArgs {
    /// Anything on a mounted volume [default: all mounted volumes]
    pub path: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho trim /mnt/jericho
  jericho trim /mnt/jericho --minimum 1M

Punches holes into the files of a volume that was formatted with --sparse, and discards blocks on block devices that
support it (their queue's discard_max_bytes is not 0). While the volume is mounted, the daemon discards freed space by
itself: some seconds after the removal, in runs of 1 MiB or more. This command discards all free space, including what a
crash left, and prints how much that was, including what was discarded before. fstrim(8) on the mount does the same, but
cannot be interrupted. Only root and the user who mounted may trim.

The files of a volume that was formatted without --sparse keep their space: there is nothing to trim, and the status is 1.")]
pub struct TrimArgs {
    /// The directory of a mount, or anything in it
    pub path: PathBuf,
    /// Skip free pieces smaller than this, with K, M, G or T
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub minimum: Option<u64>,
    /// One line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho run -- fio job.fio                                  on what is mounted already
  jericho run --volume my.volume --at /mnt/jericho -- bash    mount, run, unmount
  JERICHO_REPORT=1 jericho run -- sort /mnt/jericho/big       and say what was served inline

The command and the programs that it starts load a library (LD_PRELOAD) that serves reads and writes of
cached data in the program's own thread. Everything else goes through the kernel, as without it; so do
static programs and set-user-id ones, into which nothing can be loaded. With --placement its threads follow
their data by that policy, whatever directories say.

What is served inline, the kernel does not see: such reads and writes raise no inotify or fanotify events (open and
close do), count in no /proc/PID/io, and a buffer that is not mapped ends the program with SIGSEGV where the kernel
would say EFAULT. sync and syncfs reach mounted volumes, which they do not without this command.

Exits with the status of the command, or 128 and the signal that ended it. With --volume, SIGTERM, SIGHUP
and SIGINT are passed on to the command; without, the command takes this process's place.")]
pub struct RunArgs {
    /// First device of a volume to mount while the command runs
    #[arg(long, value_name = "VOLUME", requires = "at")]
    pub volume: Option<PathBuf>,
    /// An empty directory to mount it on
    #[arg(long, value_name = "DIR", requires = "volume")]
    pub at: Option<PathBuf>,
    #[command(flatten)]
    pub options: MountOptions,
    /// Load no library: all reads and writes through the kernel
    #[arg(long)]
    pub no_preload: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<std::ffi::OsString>,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Counters start at 0 with each mount. HITS are page lookups that found their page in the cache. LOCAL is the share of
pages that were accessed by a thread on the node that they are on: the program's own, or for programs that come through
the kernel the daemon's worker.")]
pub struct StatArgs {
    /// The directory of a mount, or anything in it
    pub dir: PathBuf,
    /// One line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho top /mnt/jericho
  jericho top /mnt/jericho --interval 10 >> log    lines, as standard output is no terminal

Rates, HITS and LOCAL are of the last interval; what is shown first is of all the time since the mount. On a terminal
q leaves.")]
pub struct TopArgs {
    /// The directory of a mount, or anything in it
    pub dir: PathBuf,
    /// Time between two looks, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub interval: Duration,
    /// Show it once, as lines
    #[arg(long)]
    pub once: bool,
}

/// From a tenth of a second to a day.
fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expected a number of seconds from 0.1 to 86400".into()),
    }
}

#[derive(Args, Debug)]
#[command(after_help = "\
Bytes in memory are counted by the node on which the kernel says they are, not on which they should
be.")]
pub struct WhereArgs {
    /// A file or directory of a mounted volume
    pub path: PathBuf,
    /// One line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho place /mnt/jericho/db                    show
  jericho place /mnt/jericho/db --node 1           what is created below from now on
  jericho place /mnt/jericho/db --node 1 --move    and what is there, while it is in use
  jericho place /mnt/jericho/db --placement never  whoever uses what is created below stays where it is

By default each directory in the root of the volume goes to the next slice, and everything below it
follows.

Threads are moved too, to the data that they use: adaptively (when it is worth it; never against an affinity that a
program has set), never, or always (at the first access from another node). What is created gets the policy of its
directory; --placement on a file changes that file's. For one run the variable JERICHO_PLACEMENT wins over both.")]
pub struct PlaceArgs {
    /// A file or directory of a mounted volume
    pub path: PathBuf,
    /// The node
    #[arg(long, value_name = "N", conflicts_with = "slice")]
    pub node: Option<u16>,
    /// The slice, where a node has several
    #[arg(long, value_name = "N")]
    pub slice: Option<u16>,
    /// When threads are moved to the data: never, always, adaptive, or inherit (as the directory above)
    #[arg(long, value_name = "POLICY")]
    pub placement: Option<ThreadsWish>,
    /// Move what is there already
    #[arg(long = "move")]
    pub move_there: bool,
    /// One line of JSON
    #[arg(long, conflicts_with = "move_there")]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Exits with 0 only if the volume is sound (after --repair: if it is sound now). Without --repair nothing
is written. A volume that is mounted for writing is refused.")]
pub struct CheckArgs {
    /// First device of the volume
    pub volume: PathBuf,
    /// Repair what can be repaired
    #[arg(long)]
    pub repair: bool,
    /// Where another device of the volume is, if it is not found by its label (may be given several times)
    #[arg(long, value_name = "PATH")]
    pub device: Vec<PathBuf>,
    /// Check although another host has not unmounted the volume, or the file of a loop device cannot be locked
    #[arg(long)]
    pub force: bool,
    /// One line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Only CPUs and memory that this process may use (affinity, cpuset) are shown.")]
pub struct TopologyArgs {
    /// NUMA nodes: auto, virtual:N, or the path of a topology file
    #[arg(long, value_name = "SPEC", default_value = "auto")]
    pub topology: String,
    /// One line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Example:
  jericho completions bash > /usr/local/share/bash-completion/completions/jericho")]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho man | man -l -
  jericho man /usr/local/share/man/man1")]
pub struct ManArgs {
    /// An existing directory
    pub dir: Option<PathBuf>,
}

/// A policy, or that of the directory above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadsWish(pub Option<ThreadPolicy>);

impl std::str::FromStr for ThreadsWish {
    type Err = String;

    fn from_str(word: &str) -> Result<ThreadsWish, String> {
        match word {
            "inherit" => Ok(ThreadsWish(None)),
            _ => word
                .parse()
                .map(|policy| ThreadsWish(Some(policy)))
                .map_err(|_| {
                    format!("expected never, always, adaptive or inherit, found {word:?}")
                }),
        }
    }
}

impl std::fmt::Display for ThreadsWish {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.map_or("inherit", ThreadPolicy::name))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
