//! Adds a device to the volume, and takes its slices into use.

use std::path::Path;
use std::sync::Arc;

use jericho_cache::{FRAMES_MIN, Slice};
use jericho_format::PAGE_BYTES;
use jericho_fs::CacheError;
use jericho_fs::types::SliceId;
use jericho_sys::limits::{Memory, node_available_bytes};
use jericho_topology::NodeId;
use jericho_volume::{AddError, Added, FormatOptions};

use crate::mounted::Mounted;
use crate::open::{homes, rest_bytes, start_cache};
use crate::resumer;

/// The result of an addition.
pub struct Addition {
    /// The device and its slices, which the volume has durably.
    pub added: Added,
    /// Why the mount does not use the slices; the next one does. `None`: it uses them.
    pub unused: Option<String>,
}

impl Mounted {
    /// Adds a file or block device to the volume, and takes its slices into use; see `Fs::add` and `Fs::take`. Keeps the device locked.
    pub fn add(&self, path: &Path, options: &FormatOptions) -> Result<Addition, AddError> {
        // Held until the slices are in use, because those of a device come after those of the one before it.
        let mut locks = self.volume.added.lock();
        let (added, lock) = self.fs().add(path, options)?;
        locks.push(lock);
        let unused = self.take(&added).err();
        let (first_slice, slices) = (added.first_slice, added.slices().len());
        match &unused {
            None => {
                tracing::info!(device = %path.display(), first_slice, slices, "a device was added")
            }
            Some(reason) => tracing::warn!(
                device = %path.display(),
                first_slice,
                slices,
                "a device was added, and its slices are not used before the next mount: {reason}"
            ),
        }
        Ok(Addition { added, unused })
    }

    /// Takes the slices of an added device into use.
    fn take(&self, added: &Added) -> Result<(), String> {
        let homes = || -> Vec<NodeId> {
            let all = homes(&self.volume.devices, self.topology());
            all[added.slices()].to_vec()
        };
        let make = || self.start_caches(added, &homes());
        let show = |caches: &[Arc<Slice>]| {
            for (cache, home) in caches.iter().zip(homes()) {
                self.show_slice(cache, home);
            }
        };
        let taken = self.fs().take(added, make, show);
        taken.map_err(|error| error.to_string())?;
        if let Err(error) = resumer::start(&self.volume) {
            tracing::warn!(
                "cannot start a thread: {error}; if the host of the device is away for too long, its slices wait for the next mount"
            );
        }
        Ok(())
    }

    /// Starts the caches of added slices, as large as the other ones if there is memory for them.
    fn start_caches(&self, added: &Added, homes: &[NodeId]) -> Result<Vec<Arc<Slice>>, CacheError> {
        // The queues of the other slices may have no threads.
        let devices = self.volume.devices.device_list().iter();
        if devices.filter(|device| device.is_blocking_only()).count() == 1
            && added.device.is_blocking_only()
        {
            let name = added.device.name();
            return Err(
                format!("{name} supports only blocking calls, unlike the other devices").into(),
            );
        }
        let count = added.slices().len();
        let now = self.volume.slice(0).memory().geometry().frames;
        let present = self.volume.slices.iter();
        let present = present.map(|slice| u64::from(slice.memory().geometry().frames));
        let present_bytes = present.sum::<u64>() * PAGE_BYTES;
        let mut memory = Memory::read()?;
        // The kernel binds the memory to the home node, and ends a process if that node has none left.
        let nodes = homes.iter().filter_map(|home| {
            let node = self.volume.topology.node(*home)?.kernel_node?;
            node_available_bytes(node)
        });
        memory.available_bytes = nodes.fold(memory.available_bytes, u64::min);
        let frames = frames_of_added(now, count, present_bytes, &memory)?;
        let volume = &self.volume;
        let start = |(slice, home): (usize, &NodeId)| -> Result<_, CacheError> {
            let of = (slice as SliceId, (frames, 0), *home);
            let cache = start_cache(&volume.devices, of, &volume.topology)?;
            volume.outages.watch(&cache);
            Ok(cache)
        };
        added.slices().zip(homes).map(start).collect()
    }

    /// Makes a further slice known to all parts of the daemon. Those that find it in the list of slices find it in all other lists.
    fn show_slice(&self, cache: &Arc<Slice>, home: NodeId) {
        self.locality.append(home, self.topology());
        self.spiller.added(cache, home);
        self.fast.show_slice(cache, home);
        self.volume.homes.append([home]);
        self.volume.slices.append([cache.clone()]);
        // A keeper that was starting has read the list before, and was not running when the slice was shown.
        self.fast.keep_slice(cache);
    }
}

/// Returns the number of frames of each of `count` further slices: `now`, as many as each of the other slices has, or fewer. `present_bytes`
/// is the memory of the other caches.
fn frames_of_added(
    now: u32,
    count: usize,
    present_bytes: u64,
    memory: &Memory,
) -> Result<u32, String> {
    let not_planned = (memory.usable_bytes()).saturating_sub(rest_bytes(memory) + present_bytes);
    // A quarter stays for the tables of the frames, for the new stores, and for other processes.
    let room = not_planned.min(memory.available_bytes / 4 * 3);
    let frames = (room / PAGE_BYTES / count as u64).min(now.into()) as u32;
    if frames < FRAMES_MIN {
        return Err(format!(
            "{} has {} MiB of memory left for their caches, and each needs {}; the next mount divides the memory among all slices",
            memory.whose(),
            room >> 20,
            (u64::from(FRAMES_MIN) * PAGE_BYTES) >> 20,
        ));
    }
    Ok(frames)
}

#[cfg(test)]
mod tests {
    use jericho_fs::types::{Kind, ROOT};

    use super::*;
    use crate::WriteMode;
    use crate::simulated::{CALLER, LONG, device, evict, mount, read, write};

    #[test]
    fn a_file_in_an_added_slice_is_cached_counted_and_written_back() {
        let device = device();
        let mounted = mount(&device);
        let dir = tempfile::tempdir().unwrap();
        let options = FormatOptions {
            size_bytes: Some(80 << 20),
            ..FormatOptions::default()
        };
        let addition = mounted.add(&dir.path().join("new"), &options).unwrap();
        assert_eq!(addition.unused, None);
        assert_eq!(mounted.slice_count(), 2);
        let fs = mounted.fs();
        let home = fs.mkdir(ROOT, b"dir", 0o755, CALLER).unwrap().ino;
        fs.set_placement(home, 1).unwrap();
        let file = fs.mknod(home, b"file", Kind::File, 0o644, 0, CALLER);
        let handle = mounted.open_file(file.unwrap().ino, true).unwrap();
        let data = vec![7; 20_000];
        let written = write(&mounted, &handle, 0, &data, WriteMode::PLAIN);
        assert_eq!(written.recv_timeout(LONG), Ok(20_000));
        evict(&mounted, &handle);
        let found = read(&mounted, &handle, (0, 20_000), false);
        assert_eq!(found.recv_timeout(LONG), Ok(data));
        let stat = mounted.stat();
        let new = &stat.slices[1];
        assert!(
            new.capacity_bytes > 40 << 20 && new.used_bytes > 0,
            "{new:?}"
        );
        assert!(new.counters.written_back_bytes >= 20_000, "{new:?}");
        assert!(new.locality.local + new.locality.remote >= 10, "{new:?}");
        assert_eq!(stat.devices.len(), 2);
        mounted.close().unwrap();
    }

    #[test]
    fn added_slices_get_caches_like_the_others_as_far_as_there_is_memory() {
        let memory = |total_mib: u64, available_mib: u64| Memory {
            total_bytes: total_mib << 20,
            available_bytes: available_mib << 20,
            limit: None,
            group_available_bytes: None,
        };
        let frames = |count, present_mib: u64, memory| {
            frames_of_added(4096, count, present_mib << 20, &memory)
        };
        // Of 1024 MiB, 256 are for the rest of the daemon.
        assert_eq!(frames(1, 32, memory(1024, 700)), Ok(4096));
        assert_eq!(frames(2, 752, memory(1024, 700)), Ok(2048));
        assert_eq!(frames(1, 32, memory(1024, 8)), Ok(1536));
        for refused in [
            frames(1, 768, memory(1024, 700)),
            frames(1, 32, memory(1024, 5)),
        ] {
            let error = refused.unwrap_err();
            assert!(
                error.contains("this machine") && error.contains("4"),
                "{error}"
            );
        }
    }
}
