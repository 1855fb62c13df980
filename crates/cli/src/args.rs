//! The command line. Scripts depend on it.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use jericho_badlink::{Chance, Cut};
use jericho_daemon::{Counters, Declared, MountCounters, ThreadPolicy};
use jericho_ether::ETHERTYPE;
use jericho_fuse::Transport;

use crate::{duration, size};

/// How long requests wait for another host, if the user says nothing, in seconds.
const DEAD_AFTER_S: u64 = 180;

/// A filesystem that keeps I/O threads, cache memory and devices on the same NUMA node
#[derive(Parser, Debug)]
#[command(
    name = "jericho",
    version,
    propagate_version = true,
    after_help = "\
Examples:
  jericho format my.volume --size 1G     make a volume in an ordinary file
  jericho mount my.volume /mnt/jericho   use it
  jericho stat /mnt/jericho              show its slices and hit counts
  jericho umount /mnt/jericho            write everything to the device

Exit status: 0 success, 1 failure (the message gives the cause and what to do), 2 wrong usage."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Make a volume on files or block devices
    Format(FormatArgs),
    /// Mount a volume on a directory, and return when it serves requests
    Mount(MountArgs),
    /// Write everything to the device and unmount
    Umount(UmountArgs),
    /// Write all data of mounted volumes to their devices
    Sync(SyncArgs),
    /// Discard the free space of a mounted volume, so that the host or SSD can reuse it
    Trim(TrimArgs),
    /// Take a larger file or block device into use, also while the volume is mounted
    Grow(GrowArgs),
    /// Add a file or block device with new slices to a volume, also while it is mounted
    Add(AddArgs),
    /// Run a command that accesses cached files without system calls, optionally on a mount of its own
    Run(RunArgs),
    /// Show the slices of a mounted volume and their cache hits
    Stat(StatArgs),
    /// Show the activity of a mounted volume, live
    Top(TopArgs),
    /// Show a file's slice, home node, and cached bytes on each node
    Where(WhereArgs),
    /// Show or set the placement of files and the migration of threads that use them
    Place(PlaceArgs),
    /// Check a volume that is not mounted
    Check(CheckArgs),
    /// Serve a file or block device to another host over raw Ethernet
    Serve(ServeArgs),
    /// Make and name the keys of clients that use devices of other hosts
    Key(KeyArgs),
    /// List the devices that other hosts serve
    Discover(DiscoverArgs),
    /// Serve a file or block device to NBD clients, such as virtual machines
    Nbd(NbdArgs),
    /// Forward Ethernet frames between two network interfaces, and spoil some, to test what a bad network does
    Wire(WireArgs),
    /// Give programs a file or loop device whose bytes are those of a device, also of another host
    Attach(AttachArgs),
    /// Make an attached disk durable and remove it
    Detach(DetachArgs),
    /// Show the NUMA nodes that Jericho uses
    Topology(TopologyArgs),
    /// Measure bandwidth and latency between the NUMA nodes, and rates of devices into each node's memory
    Probe(ProbeArgs),
    /// Measure the papers' workloads with threads and memory on given nodes, or predict for other machines
    Bench(BenchArgs),
    /// Make a page from results of bench, with the papers' figures beside them, or compare two files of results
    Report(ReportArgs),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
    /// Wait until the daemon at the other end of standard input ends, then end programs' access to its cache
    #[command(hide = true)]
    Keeper,
    /// Write the manual pages into a directory, or print the main page
    Man(ManArgs),
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho format my.volume --size 1G
  jericho format /dev/nvme0n1 /dev/nvme1n1 --slices 4
  jericho format my.volume --size 512M --force   destroys what is in it
  jericho format my.volume tyche://hostb/data --size 1G   with a slice on another host

Jericho places each slice on a device of the slice's home node, if there is one. It creates a file that does not exist, \
and allocates all of the file's space on the host, unless --sparse is given. It uses the whole of a block device. If \
format fails, it has changed nothing.

tyche://HOST/NAME is a device that another host serves (see serve). A slice is on one host, so each host has at least one slice. If a host does not \
answer, programs that use files of its slices wait for it (see jericho mount --dead-after). The other slices work on. The first device should be one of this host.")]
pub struct FormatArgs {
    /// First device of the volume: a file, a block device, or tyche://HOST/NAME
    pub volume: PathBuf,
    /// Further devices
    pub device: Vec<PathBuf>,
    /// Size of each new file, with K, M, G or T (powers of 1024)
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub size: Option<u64>,
    /// Allocate the space of files only when it is used, and discard freed space (see trim). If the host becomes full,
    /// writes to the volume fail [default: allocate all space now]
    #[arg(long)]
    pub sparse: bool,
    /// Keep a checksum of each block of data, so that a read of damaged data fails. Overwrites then go to new blocks
    #[arg(long)]
    pub checksums: bool,
    /// Number of slices [default: one per NUMA node, and at least one per host]
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
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// Options of a mount.
#[derive(Args, Clone, Debug)]
pub struct MountOptions {
    /// Memory for cached data, with K, M, G or T [default: an eighth of the memory that the daemon may use]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache: Option<u64>,
    /// Most memory of other nodes that a slice may use for its share of --cache if its own node is too small, with K, M, G or T. The slice
    /// gives this memory back when those nodes need it [default: 0: the mount fails if a node is too small]
    #[arg(long, value_name = "SIZE", value_parser = size::parse_rate)]
    pub spill: Option<u64>,
    /// NUMA nodes: auto, virtual:N, or the path of a topology file
    #[arg(long, value_name = "SPEC", default_value = "auto")]
    pub topology: String,
    /// When threads migrate to the data that they use: adaptive (when it pays off), never, or always [default: adaptive];
    /// directories can have a policy of their own (see place)
    #[arg(long, value_name = "POLICY")]
    pub threads: Option<ThreadPolicy>,
    /// With a thread that migrates to its data, move also the threads that probably use what it reads: the other threads of its process that do no
    /// I/O on the volume, and the first thread of its parent process (for example the virtual CPUs of an emulator). With `jericho run`, this has an
    /// effect only on volumes that were mounted with the option, too. Only for machines whose users trust each other
    #[arg(long)]
    pub with_parent: bool,
    /// How the daemon receives the kernel's requests: device (/dev/fuse), ring (FUSE over io_uring), or auto (ring if the
    /// kernel offers it, else device)
    #[arg(long, value_name = "TRANSPORT", default_value = "auto")]
    pub transport: Transport,
    /// Another user, or a group (:NAME), whose programs may access the cache inline under `jericho run`; may be repeated. Such a
    /// program can read and damage every cached byte of the volume, regardless of file permissions [default: the
    /// volume's owner and the user who mounts]
    #[arg(long, value_name = "USER|GROUP")]
    pub fast_path: Vec<String>,
    /// How much data to read in a second in the background, to find damage on a volume with checksums; 0: none. All data is
    /// read once a week at most [default: 4M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse_rate)]
    pub scrub_rate: Option<u64>,
    /// Write nothing to the volume
    #[arg(long)]
    pub read_only: bool,
    /// Path of another device of the volume, if its label is not found; may be repeated
    #[arg(long, value_name = "PATH")]
    pub device: Vec<PathBuf>,
    /// Mount although another host has not unmounted the volume, or the file of a loop device cannot be locked
    #[arg(long)]
    pub force: bool,
    /// File for the messages of the background daemon
    /// [default: in /var/log/jericho for root, else in ~/.local/state/jericho]
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho mount my.volume /mnt/jericho
  jericho mount my.volume ~/mnt --cache 2G --topology virtual:4
  jericho mount /dev/nvme0n1 /srv/data --foreground   for a service manager

Root mounts for all users. Other users mount for themselves only, and need fusermount3. The daemon unmounts cleanly on SIGTERM \
and SIGINT. With --foreground the daemon writes its messages to standard error, which systemd puts into the journal, and \
tells systemd when the mount serves. The variable RUST_LOG chooses what is logged (default: info; for example \
RUST_LOG=jericho_cache=debug).

make install puts helpers for mount(8) and umount(8) into /sbin. With them these mount, too:
  mount -t fuse.jericho VOLUME DIR -o cache=2G
  /srv/my.volume /mnt/jericho fuse.jericho cache=2G,nofail 0 0   a line of /etc/fstab

Options of the helper: ro, force, cache=, spill=, topology=, threads=, with-parent, transport=, scrub-rate=, fast-path=, device=, log=, nic=, ethertype=, dead-after=, take-over and no-replay. With the helpers, \
umount(8) does the same as jericho umount.")]
pub struct MountArgs {
    /// First device of the volume
    pub volume: PathBuf,
    /// An empty directory
    pub dir: PathBuf,
    #[command(flatten)]
    pub options: MountOptions,
    /// Serve in this process instead of a background daemon
    #[arg(long)]
    pub foreground: bool,
    /// This process is a background daemon whose parent waits for a line on its standard output.
    #[arg(long, hide = true)]
    pub report_to_parent: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho umount /mnt/jericho
  jericho umount --lazy /mnt/jericho    detach now, write back in the background
  jericho umount --force /mnt/jericho   discard what cannot be written

Writes everything back, marks the volume clean, and then unmounts it. If writing back fails, as on a full device, or a \
program uses the mount, the volume stays mounted; the message names the programs.

Jericho cannot refuse umount(2) and fusermount3. After one of them the daemon continues: it tries to write every second, names \
the unwritten files in its log, and holds the volume until everything is written. A second SIGTERM or SIGINT to the daemon, or \
--force here, discards what cannot be written. SIGHUP does not.")]
pub struct UmountArgs {
    /// The mount's directory; with --force also a volume that is unmounted while its daemon still writes back
    pub dir: PathBuf,
    /// Discard what cannot be written; the daemon's log names the files
    #[arg(long)]
    pub force: bool,
    /// Detach at once, even if the mount is in use or data cannot be written; the daemon ends when no program uses the mount and all data is written
    #[arg(long, conflicts_with = "force")]
    pub lazy: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho sync                 all mounted volumes
  jericho sync /mnt/jericho

Returns when everything written so far is durable, or with status 1 when that fails. The kernel does not forward sync(2) \
and syncfs(2) to FUSE daemons: on the plain mount they only write mapped pages back. Under jericho run they do the same \
as this command.")]
pub struct SyncArgs {
    /// Any path on a mounted volume [default: all mounted volumes]
    pub path: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho trim /mnt/jericho
  jericho trim /mnt/jericho --minimum 1M

Punches holes into the files of a volume that was formatted with --sparse, and discards blocks on block devices that \
support it (discard_max_bytes of their queue is not 0). While the volume is mounted, the daemon discards freed space by \
itself: some seconds after the removal, in runs of 1 MiB or more. This command discards all free space, also \
space that a crash left. It prints the number of discarded bytes, including those discarded before. fstrim(8) on the mount \
does the same, but cannot be interrupted. Only root and the user who mounted may trim.

The files of a volume that was formatted without --sparse keep their space: there is nothing to trim, and the status is 1.")]
pub struct TrimArgs {
    /// The directory of a mount, or any path in it
    pub path: PathBuf,
    /// Skip free pieces smaller than this, with K, M, G or T
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub minimum: Option<u64>,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho grow my.volume --size 2G                     make the file longer
  jericho grow /mnt/jericho --size 2G                  the same, by the directory of the mount
  jericho grow /dev/vg/data                            use what lvextend has added
  jericho grow my.volume --device disk2 --size 4G      one of several devices

Extends a file to the new size. If the volume was formatted without --sparse, the host allocates all of the new space now. A block \
device must be larger already. Without --size, each device of the volume is used up to the size that it has. The slices on a \
device share its new space evenly. A mounted volume grows while programs use it.

A volume cannot shrink. The size at the format limits the space for metadata, also later: 1 GiB if the volume had less than 4 GiB, \
4 GiB below 64 GiB, 16 GiB below 1 TiB, and 256 GiB from 1 TiB on. If the machine crashes meanwhile, the volume has its old size or the new one. \
Only root and the user who mounted may grow a mounted volume.")]
pub struct GrowArgs {
    /// First device of the volume, or the directory of its mount
    pub volume: PathBuf,
    /// New size of the device, with K, M, G or T [default: the size that it has]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub size: Option<u64>,
    /// The device that grows [default: all that have become larger]
    #[arg(long, value_name = "PATH")]
    pub device: Option<PathBuf>,
    /// Grow although another host has not unmounted the volume, or the file of a loop device cannot be locked
    #[arg(long)]
    pub force: bool,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho add my.volume disk2 --size 4G      a new file
  jericho add my.volume /dev/vg/more         a block device
  jericho add my.volume disk3 --slices 2     an existing file, with two slices
  jericho add /mnt/jericho disk2 --size 4G   the volume that is mounted there

The device gets new slices with the whole of its space. Each has a metadata store of its own and at least 64 MiB. New directories in the \
root are assigned to them in turn, too; existing files stay where they are (see jericho place --move). If the volume was formatted \
without --sparse, the host allocates all of a file's space now. Name the volume by its first device, as before.

All devices of the volume must be there. If it is mounted, programs go on meanwhile, and the new slices are used at once; only root and the \
user who mounted may add a device then. Programs under jericho run that have used the volume before go through the kernel for files in the \
new slices. The caches of the new slices come in addition to --cache until the next mount. If there is no memory for them, the command says so, \
and the next mount uses the slices. If the machine crashes meanwhile, the volume is as before or has the device. A device cannot be removed \
from a volume.")]
pub struct AddArgs {
    /// First device of the volume, or the directory of its mount
    pub volume: PathBuf,
    /// The file or block device to add, or tyche://HOST/NAME
    pub new: PathBuf,
    /// Number of new slices
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub slices: u16,
    /// Size of the new file, with K, M, G or T [default: the size that it has]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub size: Option<u64>,
    /// Path of another device of the volume, if its label is not found; may be repeated
    #[arg(long, value_name = "PATH")]
    pub device: Vec<PathBuf>,
    /// Overwrite what the new device holds
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho run -- fio job.fio                                 on what is mounted already
  jericho run --volume my.volume --at /mnt/jericho -- bash   mount, run, unmount
  JERICHO_REPORT=1 jericho run -- sort /mnt/jericho/big      report inline calls

The command and its child programs load a library (LD_PRELOAD) that serves reads and writes of cached data in the \
program's own thread. Everything else goes through the kernel. Static and set-user-id programs cannot load the library, \
so all their calls go through the kernel. With --threads their threads migrate by that policy, whatever the policies of \
directories are. With --with-parent, the daemon moves the threads that probably use what these threads read, too, if the volume \
was mounted with --with-parent.

The kernel does not see inline reads and writes. They raise no inotify or fanotify events (open and close do) and do not \
count in /proc/PID/io. A buffer that is not mapped ends the program with SIGSEGV, where the kernel would return EFAULT. \
sync(2) and syncfs(2) reach mounted volumes, which they do not without this command.

Exits with the status of the command, or with 128 plus the number of the signal that ended it. With --volume, this \
process stays and passes SIGTERM, SIGHUP and SIGINT on to the command. Without it, the command replaces this process.")]
pub struct RunArgs {
    /// First device of a volume to mount while the command runs
    #[arg(long, value_name = "VOLUME", requires = "at")]
    pub volume: Option<PathBuf>,
    /// An empty directory to mount the volume on
    #[arg(long, value_name = "DIR", requires = "volume")]
    pub at: Option<PathBuf>,
    #[command(flatten)]
    pub options: MountOptions,
    /// Load no library: all reads and writes go through the kernel
    #[arg(long)]
    pub no_preload: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<std::ffi::OsString>,
}

const STAT_HELP: &str = "\
Examples:
  jericho stat /mnt/jericho
  jericho stat --json /mnt/jericho

Counters start at 0 with each mount. RATIO is the share of page lookups that found their page in the cache (HITS). LOCAL is \
the share of pages that were accessed by a thread on the pages' home node. For programs that come through the kernel, that \
thread is the daemon's worker.

Slices that take no changes until the next mount, or until their host answers, follow the table, with the reason (in --json refuses_changes: the \
reason, or null; waits_for_host: true if the slice takes changes again when its host answers; absent: true if a device of the slice is missing, so \
that its files cannot be read either).

Counters of each slice and node in --json:
";

/// Returns the text after the options in the help of `jericho stat`.
fn stat_help() -> String {
    let mut help = String::from(STAT_HELP);
    list_counters(Counters::DECLARED, &mut help);
    help.push_str("\nCounters of the mount in --json:\n");
    list_counters(MountCounters::DECLARED, &mut help);
    help
}

fn list_counters(counters: &[Declared], help: &mut String) {
    for Declared {
        name, help: text, ..
    } in counters
    {
        help.push_str(&format!("  {name:<20} {text}\n"));
    }
}

#[derive(Args, Debug)]
#[command(after_help = stat_help())]
pub struct StatArgs {
    /// The directory of a mount, or any path in it
    pub dir: PathBuf,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho top /mnt/jericho
  jericho top /mnt/jericho --interval 10 >> log   a file gets lines

Rates, HITS and LOCAL cover the last interval. The first ones cover the time since the mount. On a terminal, q quits.")]
pub struct TopArgs {
    /// The directory of a mount, or any path in it
    pub dir: PathBuf,
    /// Time between two updates, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub interval: Duration,
    /// Print once, as lines
    #[arg(long)]
    pub once: bool,
}

/// Parses a time from a tenth of a second to a day.
fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expected a number of seconds from 0.1 to 86400".into()),
    }
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho where /mnt/jericho/db/table
  jericho where --json /mnt/jericho/db

The kernel reports on which node each cached page lies. Bytes in memory are counted by that node, which may differ from \
the home node.")]
pub struct WhereArgs {
    /// A file or directory of a mounted volume
    pub path: PathBuf,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho place /mnt/jericho/db                   show
  jericho place /mnt/jericho/db --node 1          place new files below it on node 1
  jericho place /mnt/jericho/db --node 1 --move   also move existing files, even files in use
  jericho place /mnt/jericho/db --threads never   migrate no threads that use files created below it

By default each directory in the root of the volume is assigned the next slice in turn. Files and directories below it get \
the same slice.

Jericho also migrates threads to the data that they use. Policies: adaptive (when it pays off, and never against an \
affinity that a program has set), never, or always (at the first inline access from another node). A new file or directory gets \
the policy of its directory; --threads on a file changes the policy of that file. The variable JERICHO_THREADS overrides \
both for one run.")]
pub struct PlaceArgs {
    /// A file or directory of a mounted volume
    pub path: PathBuf,
    /// Place on this node
    #[arg(long, value_name = "N", conflicts_with = "slice")]
    pub node: Option<u16>,
    /// Place on this slice, if the node has several
    #[arg(long, value_name = "N")]
    pub slice: Option<u16>,
    /// When threads migrate to the data: never, always, adaptive, or inherit (from the directory above)
    #[arg(long, value_name = "POLICY")]
    pub threads: Option<ThreadsArg>,
    /// Also move existing files
    #[arg(long = "move")]
    pub move_there: bool,
    /// Print one line of JSON
    #[arg(long, conflicts_with = "move_there")]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho check my.volume
  jericho check my.volume --repair

Exits with 0 only if the volume is sound; with --repair, if it is sound after the repair. Without --repair, check writes \
nothing. It refuses a volume that is mounted for writing.")]
pub struct CheckArgs {
    /// First device of the volume
    pub volume: PathBuf,
    /// Repair what can be repaired
    #[arg(long)]
    pub repair: bool,
    /// Also read all data, and compare it with its checksums if the volume keeps some
    #[arg(long)]
    pub data: bool,
    /// Path of another device of the volume, if its label is not found; may be repeated
    #[arg(long, value_name = "PATH")]
    pub device: Vec<PathBuf>,
    /// Check although another host has not unmounted the volume, or the file of a loop device cannot be locked
    #[arg(long)]
    pub force: bool,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Args, Debug)]
#[command(
    group = clap::ArgGroup::new("where").required(true).args(["socket", "listen"]),
    after_help = "\
Examples:
  jericho nbd disk.img --socket /run/disk.sock
  jericho nbd /dev/nvme0n1 --listen 127.0.0.1:10809 --read-only
  jericho nbd tyche://hostb/data --nic eth1 --socket /run/b.sock   served by another host
  qemu-img info 'nbd+unix:///?socket=/run/disk.sock'   a client

Prints one line when it serves, then serves until SIGINT or SIGTERM. At the end it waits some seconds for requests in progress, makes \
all writes durable and removes the socket file. If that fails, the status is 1. Under systemd, use Type=notify.

While it serves, no other process can use the device, and with --read-only no other process can write to it. The device is served as it \
is: a device of a Jericho volume shows the volume's own blocks, not the files in it. Several clients may write to one device only if they \
coordinate, for example as a cluster filesystem.

The server offers no encryption and asks for no password. A user needs write permission for the socket file to connect to --socket; every program that reaches \
the address can connect to --listen. So use --listen on networks that you trust only, or through a tunnel."
)]
pub struct NbdArgs {
    /// The file or block device to serve, or a device of another host: tyche://HOST/NAME
    pub device: PathBuf,
    #[command(flatten)]
    pub remote: RemoteArgs,
    /// Serve at a Unix socket with this path. The socket file of a server that has died is replaced
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Serve at a TCP address; the port is 10809 if it is not given, and a free one if it is 0
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<String>,
    /// Refuse all changes
    #[arg(long)]
    pub read_only: bool,
    /// Name of the export [default: the empty name, which clients can always use]
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    pub name: String,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho attach tyche://hostb/data --loop  prints /dev/loop0, for example
  mkfs.ext4 /dev/loop0 && mount /dev/loop0 /mnt
  umount /mnt && jericho detach /dev/loop0  everything is durable then
  file=$(jericho attach disk.img)           a file for any program, without root

Prints one line when the disk can be used: the path of the file, or with --loop the path of a loop device over it. A server goes on in \
the background until jericho detach. At SIGTERM or SIGINT it ends, too, unless the disk is in use; a second signal ends it in any case, and \
programs that use the disk get errors then. A further signal ends the wait for a device that does not answer.

Programs read and write any bytes of the file. Each read and write goes to the device at once, and fsync(2) makes all writes durable. The file has \
the size of the device: it cannot be truncated (so use dd conv=notrunc), and shared mappings of it are refused. Holes that a program \
punches give space back if the device is a file of this host; other devices refuse them. The loop device uses direct I/O and has blocks of 4096 bytes. If you make a filesystem \
in the file and want to mount it from the loop device later, use mkfs.ext4 -b 4096.

The file is in a directory of its own in /run/jericho for root, and in $XDG_RUNTIME_DIR/jericho for other users. Only the user who \
attached the disk may use the file. If the server dies, programs get an error. While the disk is attached, no other process can use the \
device, and with --read-only no other process can write to it. A file that a loop device uses is refused, except with --read-only.

Until everything is durable, the directory has a file not-durable below the mount. If the server is killed, the file stays, and \
the next attach there logs a warning.")]
pub struct AttachArgs {
    /// A file or block device, or a device of another host: tyche://HOST/NAME
    pub device: PathBuf,
    /// Make a loop device over the file, as root
    #[arg(long = "loop")]
    pub with_loop: bool,
    /// Refuse all changes
    #[arg(long)]
    pub read_only: bool,
    /// Directory for the file; it is made if it does not exist
    #[arg(long, value_name = "DIR")]
    pub at: Option<PathBuf>,
    /// File for the messages of the server
    /// [default: in /var/log/jericho for root, else in ~/.local/state/jericho]
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Serve in this process instead of the background
    #[arg(long)]
    pub foreground: bool,
    #[command(flatten)]
    pub remote: RemoteArgs,
    /// This process is a background server whose parent waits for a line on its standard output.
    #[arg(long, hide = true)]
    pub report_to_parent: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho detach /dev/loop0
  jericho detach tyche://hostb/data
  jericho detach --force disk.img     end a server that cannot reach its device

Writes everything to the device, removes the loop device, unmounts the file, and returns when everything is durable. If something uses the disk, the \
message names it, and the disk stays attached as it is. If not everything can be made durable, the disk stays attached, too, and the status is 1. \
The status is also 1 if the server fails or is killed after the unmount and before everything is durable.

With --force the server ends at once: changes that no fsync(2) has made durable may be lost, and programs that use the disk get errors.")]
pub struct DetachArgs {
    /// What attach has printed, or the device as it was attached
    pub disk: PathBuf,
    /// End the server at once; changes that are not durable may be lost
    #[arg(long)]
    pub force: bool,
    /// The server has started this process, and names its own mount: MAJOR:MINOR of its files.
    #[arg(long, hide = true)]
    pub own_mount: Option<String>,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho discover --nic eth1
  jericho discover --json       on all interfaces, with addresses

Prints a name for each device that a host on these networks serves without --hidden, after a second. It needs no key and begins no session.")]
pub struct DiscoverArgs {
    /// Network interfaces, separated by commas [default: $JERICHO_NIC, or all Ethernet interfaces that are up]
    #[arg(long, value_name = "IF", value_delimiter = ',')]
    pub nic: Vec<String>,
    /// Ethertype of the frames
    #[arg(long, value_name = "NUMBER", default_value = "0x88b5", value_parser = ethertype)]
    pub ethertype: u16,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  (umask 077; jericho key new > hosta.key)
  jericho serve /dev/sdb --name data --nic eth1 --client hosta:hosta.key
  jericho mount vol.img /mnt --key hosta.key
  jericho key fingerprint hosta.key

One client and the hosts whose devices it uses share a key. Copy the key's file to these hosts. A user with read permission for the file can use \
the devices, and can pretend to be one of the hosts. A file that every user can read, or that others than its owner can change, is refused.

jericho serve logs the fingerprint of a client that it refuses.")]
pub struct KeyArgs {
    #[command(subcommand)]
    pub command: KeyCommand,
}

#[derive(Subcommand, Debug)]
pub enum KeyCommand {
    /// Print a new key
    New,
    /// Print the fingerprint of a key: it names the key and does not reveal it
    Fingerprint(FingerprintArgs),
}

#[derive(Args, Debug)]
pub struct FingerprintArgs {
    /// File with a key
    pub file: PathBuf,
}

/// Which channels to another host carry a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SchedulerName {
    /// Those of network interfaces on the node of the program's thread; of these, the one that has carried the fewest bytes
    #[default]
    Affinity,
    /// All, in turn
    RoundRobin,
    /// By affinity, or all in turn while the load of the nodes differs by more than 60 %
    Dynamic,
    /// By affinity, or all in turn while requests wait on one node and the interfaces of another are idle
    Backlog,
}

/// Who sends frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ModeName {
    /// The thread that has something to send: no other thread must wake up
    Inline,
    /// Threads of each network interface: many threads that send at once do not wait for each other
    Queue,
    /// Inline, or queue while more than one thread waits to send on an interface
    #[default]
    Auto,
}

/// Which sockets carry frames on network interfaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LinkName {
    /// XDP, where the driver has zero copy and a probe at the start finds that it is faster; else packet sockets
    #[default]
    Auto,
    /// Packet sockets
    Packet,
    /// XDP sockets. They need root, and only one device or target can use them on an interface
    Xdp,
}

/// How to use a device of another host.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "For a device of another host")]
pub struct RemoteArgs {
    /// Network interfaces, separated by commas [default: $JERICHO_NIC, or all Ethernet interfaces that are up]
    #[arg(long, value_name = "IF", value_delimiter = ',')]
    pub nic: Vec<String>,
    /// Ethertype of the frames
    #[arg(long, value_name = "NUMBER", default_value = "0x88b5", value_parser = ethertype)]
    pub ethertype: u16,
    /// Take the device from another client, which loses access
    #[arg(long)]
    pub take_over: bool,
    /// Do not resend unflushed changes that the other host may have lost; flushes then fail
    #[arg(long)]
    pub no_replay: bool,
    /// Which sockets carry frames
    #[arg(long, value_enum, default_value_t)]
    pub link: LinkName,
    /// Which channels carry a request
    #[arg(long, value_enum, default_value_t)]
    pub scheduler: SchedulerName,
    /// Channels on each network interface
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub channels: u16,
    /// Who sends frames
    #[arg(long, value_enum, default_value_t)]
    pub mode: ModeName,
    /// File with the key that the other host knows [default: $JERICHO_KEY, or none]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Fail requests after this many seconds without an answer of the other host; 0: never. A slice of a mount whose changes have
    /// failed takes changes again when the host answers
    #[arg(long, value_name = "SECONDS", default_value_t = DEAD_AFTER_S)]
    pub dead_after: u64,
}

impl Default for RemoteArgs {
    fn default() -> RemoteArgs {
        RemoteArgs {
            nic: vec![],
            ethertype: ETHERTYPE,
            take_over: false,
            no_replay: false,
            link: LinkName::default(),
            scheduler: SchedulerName::default(),
            channels: 1,
            mode: ModeName::default(),
            key: None,
            dead_after: DEAD_AFTER_S,
        }
    }
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho serve /dev/nvme0n1 --name data --nic eth1 --client hosta:hosta.key
  jericho serve disk.img --name data --nic eth1,eth2 --client hosta:a.key --encrypt
  jericho serve null:1G --name empty --nic eth1 --no-auth     no I/O, to measure the network

Serves in the foreground until SIGTERM or SIGINT. The other host names the device tyche://HOST/NAME. One client at a time uses it. \
If the device's host restarts, the client sends again what it had not flushed, and meanwhile no other host gets the device without --take-over: jericho keeps a record of the client in \
a file of --state.

Each client has a key, which `jericho key new` makes. Give the file with the key to --client here, and to --key at the client. Every frame is authenticated, and with --encrypt its contents are secret. \
With --no-auth, everybody on these networks can read and change the device.

Raw frames need the capability CAP_NET_RAW. A user without it must be in the group of the program jericho-packet, which `make install` puts into libexec/jericho.")]
pub struct ServeArgs {
    /// File or block device, or null:SIZE
    pub device: PathBuf,
    /// Name of the device for other hosts
    #[arg(long)]
    pub name: String,
    /// Network interfaces, separated by commas
    #[arg(long, value_name = "IF", value_delimiter = ',', required = true)]
    pub nic: Vec<String>,
    /// Name of this host for other hosts [default: the host name]
    #[arg(long)]
    pub host: Option<String>,
    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,
    /// Let a client use the device: a name for it, and a file with its key; may be repeated
    #[arg(long, value_name = "ID:KEYFILE", conflicts_with = "no_auth", value_parser = client)]
    pub client: Vec<(String, PathBuf)>,
    /// Authenticate each frame; this is the default
    #[arg(long, conflicts_with_all = ["encrypt", "no_auth"])]
    pub mac: bool,
    /// Authenticate each frame, and encrypt its contents
    #[arg(long, conflicts_with = "no_auth")]
    pub encrypt: bool,
    /// Serve without keys: everybody on these networks can use the device
    #[arg(long)]
    pub no_auth: bool,
    /// Who sends frames
    #[arg(long, value_enum, default_value_t)]
    pub mode: ModeName,
    /// Answer only searches that name the device
    #[arg(long)]
    pub hidden: bool,
    /// NUMA nodes: auto, virtual:N, or the path of a topology file
    #[arg(long, value_name = "SPEC", default_value = "auto")]
    pub topology: String,
    /// Ethertype of the frames
    #[arg(long, value_name = "NUMBER", default_value = "0x88b5", value_parser = ethertype)]
    pub ethertype: u16,
    /// Which sockets carry frames
    #[arg(long, value_enum, default_value_t)]
    pub link: LinkName,
    /// Directory of the record of the device's client [default: /var/lib/jericho/serve, or below $XDG_STATE_HOME]
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// Parses an Ethertype: a number from 0x600 on, decimal or hexadecimal.
fn ethertype(text: &str) -> Result<u16, String> {
    let number = match text.strip_prefix("0x") {
        Some(digits) => u16::from_str_radix(digits, 16),
        None => text.parse(),
    };
    let expected = "expected a number from 0x600 to 0xffff";
    let number = number.map_err(|_| expected.to_owned())?;
    // Smaller numbers are lengths (IEEE 802.3).
    (number >= 0x600)
        .then_some(number)
        .ok_or(expected.to_owned())
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho wire eth1 eth2 --loss 1%
  jericho wire eth1 eth2 --seed 7 --loss 0.1% --reorder 10% --duplicate 10% --corrupt 1%
  jericho wire eth1 eth2 --delay 5ms --cut 5s:1s    of every 5 s, nothing passes for the last 1 s
  kill -USR1 PID                                    cut the link, or join it again

Forwards frames of every Ethertype in both directions. Each fault applies to both directions. The faults of a frame depend only on the seed, the direction and the number \
of the frame, so the same frames have the same faults again. Cuts depend on the time.

Runs in the foreground until SIGTERM, SIGINT or SIGHUP, and prints one line when it forwards. At the end it prints how many frames of each direction were \
forwarded, lost, reordered, duplicated, corrupted and cut. The command also counts the frames that it dropped without a fault: a buffer was full, the command could not finish the frame, the frame was longer than the MTU \
allows, or the frame was under way at the end.

The two interfaces should have no addresses, and no bridge. The command needs CAP_NET_RAW. Most hosts need no settings: the command itself finishes checksums and divides the \
long frames of TCP and UDP that a virtual interface leaves unfinished. So each fault applies to a single frame, as on a cable. The command cannot do this for LRO, \
long frames of tunnels or checksums of SCTP: switch these offloads off with ethtool -K.")]
pub struct WireArgs {
    /// A network interface
    pub a: String,
    /// Another network interface
    pub b: String,
    /// Number that chooses the faults
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Frames that are lost
    #[arg(long, value_name = "PERCENT", default_value = "0")]
    pub loss: Chance,
    /// Frames that later frames may overtake. A frame waits 10 ms for them at most
    #[arg(long, value_name = "PERCENT", default_value = "0")]
    pub reorder: Chance,
    /// Most frames that overtake a frame
    #[arg(long, value_name = "FRAMES", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub reorder_by: u32,
    /// Frames that arrive twice. With --reorder, the copies may be apart
    #[arg(long, value_name = "PERCENT", default_value = "0")]
    pub duplicate: Chance,
    /// Frames of which a byte changes, beyond the Ethernet header
    #[arg(long, value_name = "PERCENT", default_value = "0")]
    pub corrupt: Chance,
    /// Time that each frame takes, with us, ms or s. A direction keeps 64 MiB of frames at most
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = duration::parse)]
    pub delay: Duration,
    /// Let nothing pass for the last part of each period, for example 5s:1s
    #[arg(long, value_name = "PERIOD:LENGTH", value_parser = cut)]
    pub cut: Option<Cut>,
}

/// Parses a period and the part of it when nothing passes.
fn cut(text: &str) -> Result<Cut, String> {
    const EXAMPLE: &str = "write for example 5s:1s: of every 5 s, nothing passes for the last 1 s";
    let Some((period, length)) = text.split_once(':') else {
        return Err(format!("{text:?} is not a period and a length: {EXAMPLE}"));
    };
    let (period, length) = (duration::parse(period)?, duration::parse(length)?);
    match !length.is_zero() && length < period {
        true => Ok(Cut { period, length }),
        false => Err(format!(
            "{text:?} has a length that is zero or not shorter than the period: {EXAMPLE}"
        )),
    }
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho topology
  jericho topology --topology virtual:4

Shows only CPUs and memory that this process may use (affinity, cpuset).")]
pub struct TopologyArgs {
    /// NUMA nodes: auto, virtual:N, or the path of a topology file
    #[arg(long, value_name = "SPEC", default_value = "auto")]
    pub topology: String,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho probe
  jericho probe --svg nodes.svg
  jericho probe --json --device /dev/nvme0n1 --device /dev/nvme1n1

Measures from the CPUs of every node to the memory of every node: the bandwidth of reads and writes by one CPU and by all CPUs of the node, the latency of one \
read, and the latency while other CPUs stream. Also measures what it costs to move a thread to another node. Takes half a minute at most on two nodes; other load on the machine spoils \
the figures. Uses at most a quarter of the free memory of a node, and memory of one node at a time.

Each device is read, sequentially and with direct I/O, by threads of each node into memory of each node. It is opened for reading only. tyche://HOST/NAME is a device of another host.

The report is kept in /var/lib/jericho/probe.json for root, else in $XDG_STATE_HOME/jericho/probe.json ($XDG_STATE_HOME is ~/.local/state by default), or in the file that JERICHO_PROBE names (nowhere if it is empty). It replaces the report before. Mounts that begin later, by the \
same user, on a machine with the same CPU model and the same nodes, take from it when a thread should migrate to its data; jericho stat says where the costs come from. Remove the file to return to the defaults.

If the report cannot be kept, the command says so, and prints the figures all the same.")]
pub struct ProbeArgs {
    /// NUMA nodes: auto, virtual:N, or the path of a topology file
    #[arg(long, value_name = "SPEC", default_value = "auto")]
    pub topology: String,
    /// A file, a block device, or tyche://HOST/NAME to read; may be repeated
    #[arg(long, value_name = "DEVICE")]
    pub device: Vec<PathBuf>,
    /// Measure for a few seconds only, with small buffers: the figures scatter more
    #[arg(long)]
    pub quick: bool,
    /// Also draw a heat map
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho bench scan /mnt/jericho --placement best
  jericho bench zmio /dev/nvme0n1 /dev/nvme1n1 --placement TRORP0I0 --threads 1,2,4,8
  jericho bench all /mnt/data --out results.jsonl
  jericho bench scan /mnt/jericho --path fast --placement best
  jericho bench all my.volume --path process               a volume that is not mounted
  jericho bench scan /mnt/jericho --migration adaptive     with the migration that programs get
  jericho bench zmio /mnt/data --variant read-1m --with-mstress
  jericho bench mstress /mnt/data --placement worst        bandwidth of remote memory
  jericho bench zmio /dev/nvme0n1 --generator fio          the same run by fio
  jericho bench fsmark /mnt/data --variant create          files a second
  jericho bench fsmark /mnt/data --generator fs_mark       the same run by fs_mark
  jericho bench scan /mnt/jericho --variant randread --threads 8 --placement-trace accesses.jsonl
  jericho bench --model list                 the machines of the papers
  jericho bench --model opteron --placement worst --threads 1,8,64
  jericho bench --model my-server.toml --trace accesses.jsonl
  jericho bench --model judged               the model's values beside the papers'

Workloads: zmio (asynchronous direct I/O), fsmark (small files), checkpoint (a shared file, as IOR), stream (a thread that reads records and one \
that stores them), search (an index of a corpus), scan (64 files, sequential and random, as fio), dd (direct reads of 512 KiB), mstress (copies of \
memory, without storage), all (without mstress). \
The papers' applications Dedup, Ferret, Metis, Borealis, HBase, BDB, TPC-C, TPC-E and Tariff are left out.

Placements: TRLCPL, TRLCPR, TRRCPL, TRRCPR say whether the transfer between device and cached page, and the copy between cached page and program, \
are local or remote. TLORPLIR, TLORPRIR, TRORPLIR, TRORPRIR, TLORP0I0, TRORP0I0 say the same of direct I/O: the transfer, and the CPU that uses the \
data. The others use the nodes in turn, wherever the device is. proper, best: threads are on the node of their cached pages or buffers. worst, bad: \
threads are far from these. native: the kernel chooses. The kernel confirms where memory and threads are.

In a directory, bench makes directories of its own and removes them. It writes to no device without --force, so without --variant it leaves out forms that write. all leaves out workloads that do not fit, and says so.

The columns of cycles count busy CPUs only, without I/O wait. cycles/IO: for each sector of 512 bytes that the devices moved; - if there is no value, for \
example because the data was cached. cycles/512B: for each 512 bytes that the program moved.

With --model, bench runs nothing. The model shares bandwidths of memory, links and devices fairly among threads. It has no caches of CPUs, no locks \
and no interrupts, and misses some results of the papers: see docs/internals/model.md. Machine files are described in docs/formats/machine.md, traces in \
docs/formats/placement-trace.md. Throughput is in GB/s (10^9 bytes).")]
pub struct BenchArgs {
    /// The workload, or all
    #[arg(required_unless_present = "model")]
    pub workload: Option<String>,
    /// Directories, or devices: files, block devices, tyche://HOST/NAME. Instances use them in turn
    #[arg(required_unless_present = "model")]
    pub targets: Vec<PathBuf>,
    #[command(flatten)]
    pub remote: RemoteArgs,
    /// Where threads, buffers and cached pages are [default: native; with --model, all that the machine can have]
    #[arg(long, value_name = "NAME")]
    pub placement: Option<String>,
    /// Numbers of threads; a run is made for each [default: as the papers, or up to twice the number of CPUs]
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    pub threads: Vec<u32>,
    /// Length of each measurement in seconds [default: chosen so that a workload ends within a minute; with --as-paper 30, after 30 that are discarded]
    #[arg(long, value_name = "N")]
    pub seconds: Option<f64>,
    /// Append a line of JSON for each run to this file
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// How to reach a Jericho volume: mount (system calls), fast (hits inline, as under jericho run), or process (the targets are volumes that are not mounted,
    /// and bench opens them itself) [default: mount; under jericho run: fast]
    #[arg(long, value_name = "WAY", hide_possible_values = true)]
    pub path: Option<PathArg>,
    /// Forms of the workload to run, for example read-64k [default: all; for zmio: read-64k, read-1m and write-1m]. zmio also has read-128k, read-256k,
    /// read-512k, and write-64k to write-512k
    #[arg(long, value_name = "NAME,NAME,...", value_delimiter = ',')]
    pub variant: Vec<String>,
    /// Have another program make the operations, with the same sizes and placement: fio (for zmio, scan and dd) or fs_mark (for the variant create of fsmark)
    #[arg(long, value_name = "PROGRAM", hide_possible_values = true)]
    pub generator: Option<GeneratorArg>,
    /// Write the nodes of the run's accesses to this file, for --model with --trace. Choose one run with --variant and --threads
    #[arg(long, value_name = "FILE")]
    pub placement_trace: Option<PathBuf>,
    /// Take the papers' sizes and numbers of threads
    #[arg(long)]
    pub as_paper: bool,
    /// Run threads of mstress beside the workload. They copy memory: one for each thread of the workload, up to 8, but at least one on each node that has its
    /// cached pages or buffers
    #[arg(long)]
    pub with_mstress: bool,
    /// Let zmio write to the devices, which destroys what is on them
    #[arg(long)]
    pub force: bool,
    /// When Jericho moves threads to their data, under the placement native on a Jericho mount: never, adaptive (when it pays off), or always
    #[arg(long, value_name = "POLICY", default_value = "never")]
    pub migration: ThreadPolicy,
    /// Seed of offsets and contents
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// NUMA nodes: auto, virtual:N, or the path of a topology file [default: those of the mount; auto if the targets are on no Jericho mount]
    #[arg(long, value_name = "SPEC")]
    pub topology: Option<String>,
    /// Predict for this machine: a name from list, a machine file, or a file with the output of jericho probe --json; or list, or judged
    #[arg(long, value_name = "MACHINE", conflicts_with_all = ["workload", "seconds", "out", "path", "variant", "generator", "placement_trace", "as_paper", "with_mstress", "migration", "force"])]
    pub model: Option<String>,
    /// With --model: predict for the accesses of a real run, a JSON object a line
    #[arg(
        long,
        value_name = "FILE",
        requires = "model",
        conflicts_with = "placement"
    )]
    pub trace: Option<PathBuf>,
    /// With --model: print one line of JSON
    #[arg(long, requires = "model")]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  jericho bench scan /mnt/data --placement best --out results.jsonl
  jericho bench scan /mnt/data --placement worst --out results.jsonl
  jericho report results.jsonl --out report.html
  jericho report --compare before.jsonl after.jsonl --out comparison.html

The page is one file that needs nothing from elsewhere: throughput over threads with shares of local accesses, latencies, cycles per I/O, the heat map of \
the probe, and the papers' ratios beside those of the results.

A comparison takes runs of the same workload, placement, number of threads and sizes. Lines of the same conditions in a file are repetitions: it takes \
four in each file to see a difference. It shows the ratio of the second file to the first one with a 95 % confidence interval, and says no difference \
if the interval includes 1.")]
pub struct ReportArgs {
    /// Files that bench --out has written
    #[arg(required_unless_present = "compare", value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Compare the runs of two files
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = ["files", "probe"])]
    pub compare: Vec<PathBuf>,
    /// The page
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// A report of probe --json to show as a heat map [default: the one that probe has kept]
    #[arg(long, value_name = "FILE")]
    pub probe: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
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

/// The way of `jericho bench` to a Jericho volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PathArg {
    /// System calls on the mount
    Mount,
    /// The mount, with hits inline
    Fast,
    /// The volume is open in the process of bench
    Process,
}

/// A program that makes operations for `jericho bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GeneratorArg {
    /// fio
    Fio,
    /// fs_mark
    #[value(name = "fs_mark")]
    FsMark,
}

/// A migration policy, or `None` for the policy of the directory above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadsArg(pub Option<ThreadPolicy>);

impl std::str::FromStr for ThreadsArg {
    type Err = String;

    fn from_str(word: &str) -> Result<ThreadsArg, String> {
        match word {
            "inherit" => Ok(ThreadsArg(None)),
            _ => word
                .parse()
                .map(|policy| ThreadsArg(Some(policy)))
                .map_err(|_| {
                    format!("expected never, always, adaptive or inherit, found {word:?}")
                }),
        }
    }
}

impl std::fmt::Display for ThreadsArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.map_or("inherit", ThreadPolicy::name))
    }
}

/// Parses the name of a client and the file of its key.
fn client(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once(':') {
        Some((id, file)) if !id.is_empty() && !file.is_empty() => Ok((id.to_owned(), file.into())),
        _ => Err(format!(
            "{text:?} is not ID:KEYFILE: write, for example, hosta:/etc/jericho/hosta.key"
        )),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }

    #[test]
    fn a_bad_cut_is_named_in_the_message_with_an_example() {
        let cut = |period, length| jericho_badlink::Cut { period, length };
        let ms = std::time::Duration::from_millis;
        assert_eq!(super::cut("1.5s:200ms"), Ok(cut(ms(1500), ms(200))));
        for bad in ["5s", "5s:5s", "1s:5s", "5s:0", "5s:1", ":", "5s:1s:1s"] {
            let message = super::cut(bad).expect_err(bad);
            let named = bad.split(':').find(|part| message.contains(part));
            assert!(named.is_some(), "{bad}: {message}");
            assert!(message.contains("for example"), "{message}");
        }
    }

    #[test]
    fn each_command_has_examples_and_leaves_the_wrapping_of_its_help_to_clap() {
        for command in super::Cli::command().get_subcommands() {
            if command.is_hide_set() {
                continue;
            }
            let (name, help) = (command.get_name(), command.get_after_help());
            let help = help.map(ToString::to_string).unwrap_or_default();
            assert!(help.starts_with("Examples:\n  "), "{name}: {help}");
            let mut before = "";
            for line in help.lines() {
                let is_text = |line: &str| !line.is_empty() && !line.starts_with(' ');
                assert!(
                    !is_text(line) || !is_text(before),
                    "{name}: wrapped by hand: {line}"
                );
                assert!(
                    is_text(line) || line.len() <= 100,
                    "{name}: too long for an example: {line}"
                );
                before = line;
            }
        }
    }
}
