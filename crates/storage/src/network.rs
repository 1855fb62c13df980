//! What a device of another host knows of its network.

use serde::{Deserialize, Serialize};

/// The network of a device of another host, since the device was opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkStat {
    /// Name of the device.
    pub device: String,
    /// How frames are protected, for example "authenticated".
    pub security: String,
    /// Channels carry requests of all nodes at present, not only of their own.
    pub is_spread: bool,
    /// How often the scheduler has changed that.
    pub schedule_changes: u64,
    /// The channels.
    pub channels: Vec<ChannelStat>,
    /// The locks between threads.
    pub locks: Vec<LockStat>,
}

/// A channel: a pair of network interfaces, one of each host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelStat {
    /// Network interface of this host.
    pub nic: String,
    /// NUMA node of the interface, if it is known.
    pub node: Option<u32>,
    /// Threads of the interface send its frames at present, not the threads that ask.
    pub is_queueing: bool,
    /// The other host answers.
    pub is_up: bool,
    /// Smoothed time between a frame and its acknowledgement.
    pub round_trip_us: u64,
    /// Frames that may be on their way.
    pub window_frames: u32,
    /// Frames that were sent.
    pub sent_frames: u64,
    /// Frames whose content was sent again.
    pub lost_frames: u64,
    /// Bytes that were sent for threads on the node of the interface.
    pub local_bytes: u64,
    /// Bytes that were sent for other threads.
    pub remote_bytes: u64,
}

/// A lock between threads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockStat {
    /// What it protects.
    pub name: String,
    /// How often it was acquired.
    pub acquisitions: u64,
    /// How often a thread had to wait for it.
    pub waits: u64,
    /// Time that threads have waited for it.
    pub wait_us: u64,
    /// Mean time for which it was held, of one acquisition in 16.
    pub hold_mean_ns: u64,
}
