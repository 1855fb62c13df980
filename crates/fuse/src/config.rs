//! How a volume is mounted.

/// The transport of the kernel's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// The FUSE ring if the kernel offers it, otherwise the device.
    #[default]
    Auto,
    /// `/dev/fuse`.
    Device,
    /// The FUSE ring (FUSE over io_uring).
    Ring,
}

impl std::str::FromStr for Transport {
    type Err = String;

    fn from_str(name: &str) -> Result<Transport, String> {
        [Transport::Auto, Transport::Device, Transport::Ring]
            .into_iter()
            .find(|transport| transport.name() == name)
            .ok_or_else(|| "a transport is auto, device or ring".into())
    }
}

impl Transport {
    /// Returns the name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Device => "device",
            Transport::Ring => "ring",
        }
    }
}

/// How a volume or a disk is mounted.
#[derive(Clone, Debug)]
pub struct MountConfig {
    /// The source that `mount` and `/proc/mounts` show: the path of the volume or device.
    pub source: String,
    /// The type that `mount` and `/proc/mounts` show, after "fuse.".
    pub subtype: &'static str,
    /// The kernel refuses all changes.
    pub read_only: bool,
    /// Other users may use the mount; the kernel checks their permissions. For an ordinary user, this requires `user_allow_other`
    /// in /etc/fuse.conf.
    pub allow_other: bool,
    /// The kernel honours set-id bits and device files, as in a mount by root.
    pub privileged: bool,
    /// Number of threads that serve requests. `None`: for a volume one per CPU, at least 8 and at most 32, then rounded up to equally
    /// many for each node; for a disk 32.
    pub workers: Option<usize>,
    /// The transport of requests. Those of a disk come through the device.
    pub transport: Transport,
}

impl MountConfig {
    /// Returns the configuration for the calling user: a mount by root is for all users, another mount only for its user.
    pub fn for_this_user(source: String, read_only: bool) -> MountConfig {
        let root = rustix::process::geteuid().is_root();
        MountConfig {
            source,
            subtype: "jericho",
            read_only,
            allow_other: root,
            privileged: root,
            workers: None,
            transport: Transport::Auto,
        }
    }
}
