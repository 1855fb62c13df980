//! A device of another host, over raw Ethernet. The crate `remote` has the protocol, and this crate gives it sockets, threads, a
//! clock, and on the target a device.
//!
//! A target is a [`Server`]: a thread for each network interface receives frames and begins transfers of the device, and workers make the device's blocking calls. An initiator is a
//! [`RemoteDevice`]: each call sends its own frames, or has threads of the interface send them, and a thread for each NUMA node receives.
//!
//! `links` has the sockets, `socket` the one of an interface, `probe` finds out which kind is faster, `outbox` the frames to be sent, `copies` payloads that are copied without the lock, `alarm` sets timers, `reserve` names that one process may have, `owner` the record of an export's owner, `recorder` its thread, `key_file` keys of clients, `lock` a lock that knows its waits, `placement` the NUMA nodes, `workers` the device's calls, `transfers` those on io_uring, `server` starts the target, `serving` is what its threads share, `url` names of remote
//! devices, `remotes` opens them for functions that take paths, `inside` what the threads of an initiator share, `device` the initiator, `receiving` its threads, `watch` what wakes a thread that receives, and `discover` the question to all hosts.
#![forbid(unsafe_code)]

mod alarm;
mod copies;
mod device;
mod discover;
mod inside;
mod key_file;
mod links;
mod lock;
mod null;
mod outbox;
mod owner;
mod placement;
mod probe;
mod receiving;
mod recorder;
mod remotes;
mod reserve;
mod server;
mod serving;
mod socket;
mod transfers;
mod url;
mod watch;
mod workers;

pub use device::{AttachConfig, AttachError, RemoteDevice};
pub use discover::{DiscoverError, discover};
pub use jericho_format::wire::ETHERTYPE;
pub use jericho_format::wire::mac_text;
pub use jericho_remote::{Client, Found, Key, Scheduler, Security, hexadecimal};
pub use jericho_sys::packet::PacketError;
pub use key_file::{KeyError, new_key, read_key};
pub use links::{LinkError, interfaces};
pub use null::null_device;
pub use outbox::Mode;
pub use remotes::{EtherRemotes, RemoteOptions};
pub use server::{ServeConfig, ServeError, Server};
pub use socket::LinkChoice;
pub use url::{Remote, UrlError};
