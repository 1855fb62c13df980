//! Formats a volume on open devices.
//!
//! Destroys the label of the first device first and writes it last. An interrupted format therefore leaves devices that are not
//! a volume, never half of one.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::{DEVICES_MAX, DeviceEntry, NO_NODE, SLICES_MAX, Superblock};
use jericho_storage::{BLOCK_BYTES, Device, remote_host};
use zerocopy::FromZeros;
use zerocopy::byteorder::little_endian::{U16, U32, U64};

use crate::error::VolumeError;
use crate::foreign;
use crate::labels::label;
use crate::layout::{self, Space};
use crate::superblocks::Superblocks;
use crate::volume::Volume;

/// Properties of a new volume.
#[derive(Clone, Debug, Default)]
pub struct FormatOptions {
    /// Size of each regular file in bytes. `None` keeps the file's size.
    pub size_bytes: Option<u64>,
    /// Number of slices. `None` means one for each of `nodes`, but at least one for each host that has devices.
    pub slices: Option<u16>,
    /// Nodes that are assigned to the slices in turn. If empty, the slices have no node.
    pub nodes: Vec<u32>,
    /// Node of each device, where the caller knows it better than the kernel. May be shorter than the list of devices.
    pub device_nodes: Vec<Option<u32>>,
    /// Overwrites existing data.
    pub force: bool,
    /// Allocates all space of regular files now. Otherwise the files are sparse, and the host may be full when the volume needs
    /// the space.
    pub preallocate: bool,
    /// Called to report progress where the host can allocate only by writing: bytes that have space, and bytes in total.
    pub progress: Option<fn(u64, u64)>,
    /// Whether each slice has a metadata store and a journal of its own. `None`: if each slice has at least 64 MiB.
    pub has_stores: Option<bool>,
    /// Keeps a checksum of each block of a file's data.
    pub checksums: bool,
    /// Owner of the root directory, which the caller of the format makes: uid and gid.
    pub owner: (u32, u32),
}

/// Description of a new volume.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Identity of the volume.
    pub uuid: [u8; 16],
    /// Devices, as name and bytes used.
    pub devices: Vec<(Arc<str>, u64)>,
    /// Slices, as home node, index of the device and capacity in bytes.
    pub slices: Vec<(Option<u32>, u16, u64)>,
    /// Initial size of the metadata region.
    pub metadata_bytes: u64,
}

/// Formats a volume on devices that are open for writing. `paths` are stored for finding the devices again. Writes nothing
/// unless all checks pass. `make_contents` writes the first contents, before the labels make the devices a volume.
pub fn format_devices(
    devices: &[Arc<dyn Device>],
    paths: &[PathBuf],
    options: &FormatOptions,
    make_contents: impl FnOnce(&Volume) -> Result<(), VolumeError>,
) -> Result<Summary, VolumeError> {
    let superblock = prepare(devices, paths, options)?;
    write(devices, superblock, make_contents)
}

/// Refuses invalid numbers of devices and slices.
pub(crate) fn check_counts(devices: usize, options: &FormatOptions) -> Result<(), VolumeError> {
    if devices == 0 {
        return Err(VolumeError::NoDevices);
    }
    if devices > DEVICES_MAX {
        return Err(VolumeError::TooManyDevices {
            asked: devices,
            most: DEVICES_MAX,
        });
    }
    match options.slices {
        Some(0) => Err(VolumeError::NoSlices),
        Some(asked) if usize::from(asked) > SLICES_MAX => Err(VolumeError::TooManySlices {
            asked: asked.into(),
            most: SLICES_MAX,
        }),
        _ => Ok(()),
    }
}

/// Plans a volume on devices of these sizes.
pub(crate) fn check_plan(
    spaces: &[Space],
    options: &FormatOptions,
) -> Result<Superblock, VolumeError> {
    check_counts(spaces.len(), options)?;
    let slices = match options.slices {
        Some(slices) => usize::from(slices),
        None => options.nodes.len().max(layout::hosts(spaces)),
    };
    let node = |slice: usize| match options.nodes.len() {
        0 => None,
        nodes => Some(options.nodes[slice % nodes]),
    };
    let nodes: Vec<Option<u32>> = (0..slices).map(node).collect();
    let mut superblock = Superblock::new();
    layout::plan(&mut superblock, spaces, &nodes, options.has_stores)?;
    Ok(superblock)
}

/// Runs all checks and plans the volume, without writing.
pub(crate) fn prepare(
    devices: &[Arc<dyn Device>],
    paths: &[PathBuf],
    options: &FormatOptions,
) -> Result<Superblock, VolumeError> {
    let spaces: Vec<Space> = devices
        .iter()
        .enumerate()
        .map(|(index, device)| Space {
            name: device.name(),
            blocks: device.size_bytes() / BLOCK_BYTES,
            node: options
                .device_nodes
                .get(index)
                .copied()
                .flatten()
                .or(device.home_node()),
            host: remote_host(Path::new(&*device.name())).map(Into::into),
        })
        .collect();
    let mut superblock = check_plan(&spaces, options)?;
    if options.checksums {
        superblock.head.set_checksums();
    }
    if !options.force {
        for device in devices {
            if let Some(what) = foreign::recognise(&**device)? {
                return Err(VolumeError::InUse {
                    path: device.name(),
                    what,
                });
            }
        }
    }
    let mut random = [0u8; 32];
    random_bytes(&mut random)?;
    let (uuid, seed) = random.split_at(16);
    superblock.head.volume_uuid.copy_from_slice(uuid);
    superblock.head.hash_seed.copy_from_slice(seed);
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    superblock.head.created_s = U64::new(now.as_secs());
    for (index, space) in spaces.iter().enumerate() {
        let path = paths.get(index).map(PathBuf::as_path);
        superblock.devices.push(device_entry(space, path)?);
    }
    Ok(superblock)
}

/// Returns the entry of a new device, with a new id.
pub(crate) fn device_entry(space: &Space, path: Option<&Path>) -> Result<DeviceEntry, VolumeError> {
    let mut entry = DeviceEntry::new_zeroed();
    random_bytes(&mut entry.uuid)?;
    entry.blocks = U64::new(space.blocks);
    entry.node = U32::new(space.node.unwrap_or(NO_NODE));
    // Omits a path that does not fit, because it is only a hint.
    let path = path
        .map(|p| p.as_os_str().as_encoded_bytes())
        .unwrap_or_default();
    if path.len() <= entry.path.len() {
        entry.path[..path.len()].copy_from_slice(path);
        entry.path_bytes = U16::new(path.len() as u16);
    }
    Ok(entry)
}

fn random_bytes(bytes: &mut [u8]) -> Result<(), VolumeError> {
    let path = "/dev/urandom";
    File::open(path)
        .and_then(|mut file| file.read_exact(bytes))
        .map_err(|cause| VolumeError::System {
            action: "read",
            path: path.into(),
            cause,
        })
}

/// Writes a planned volume.
pub(crate) fn write(
    devices: &[Arc<dyn Device>],
    superblock: Superblock,
    make_contents: impl FnOnce(&Volume) -> Result<(), VolumeError>,
) -> Result<Summary, VolumeError> {
    let zeros = vec![0; PAGE_BYTES as usize];
    for device in devices {
        device.write_at(0, &zeros)?;
        device.flush()?;
    }
    let labels: Vec<Vec<u8>> = (0..devices.len())
        .map(|i| label(&superblock, i).encode())
        .collect();
    let superblocks = Superblocks::create(devices.to_vec(), superblock)?;
    let volume = Volume::assemble(devices.to_vec(), superblocks, false);
    make_contents(&volume)?;
    for device in devices {
        device.flush()?;
    }
    // Writes the first device last, because its label makes the devices a volume.
    for (device, label) in devices.iter().zip(&labels).rev() {
        device.write_at(0, label)?;
        device.flush()?;
    }
    let slices = volume
        .slices()
        .iter()
        .map(|s| (s.node, s.device(), s.blocks * PAGE_BYTES))
        .collect();
    Ok(volume.superblocks().with(|s| Summary {
        uuid: s.head.volume_uuid,
        devices: devices
            .iter()
            .zip(&s.devices)
            .map(|(d, entry)| (d.name(), entry.blocks.get() * PAGE_BYTES))
            .collect(),
        slices,
        metadata_bytes: s.chunks.len() as u64 * u64::from(s.head.chunk_blocks.get()) * PAGE_BYTES,
    }))
}
