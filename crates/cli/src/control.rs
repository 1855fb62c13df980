//! Requests to the daemon of a mount: the client side of `jericho_fuse::control`.

use std::path::Path;

use jericho_daemon::{GrowRequest, Stat, Where};
use jericho_fuse::addition::{ADD, Add, AddRequest, added_name};
use jericho_fuse::control::{
    Grow, InodePlacement, MOVE, PLACE, STAT, STAT_SLICES_PER_PAGE, SYNC, THREADS, TRIM, Trim,
    WHERE, grow_name,
};
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use serde::de::DeserializeOwned;

use crate::failure::{Context, Failure};

/// Maximum size of an extended attribute's value.
const VALUE_BYTES_MAX: usize = 64 << 10;

fn get<T: DeserializeOwned>(path: &Path, name: &str) -> Result<T, Failure> {
    let mut value = vec![0u8; VALUE_BYTES_MAX];
    let length =
        rustix::fs::lgetxattr(path, name, &mut value[..]).map_err(|errno| explain(path, errno))?;
    serde_json::from_slice(&value[..length]).map_err(|error| not_understood(path, &error))
}

fn not_understood(path: &Path, error: &serde_json::Error) -> Failure {
    Failure::new(format!(
        "this program does not understand the answer of the daemon of {}; is it another version?: {error}",
        path.display()
    ))
}

fn explain(path: &Path, errno: Errno) -> Failure {
    let path = path.display();
    Failure::new(match errno {
        Errno::NODATA | Errno::OPNOTSUPP => {
            format!("{path} is not on a mounted Jericho volume; mount one with jericho mount")
        }
        // Over the FUSE ring the kernel answers ECANCELED for a moment.
        Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED => format!(
            "the daemon of {path} is gone; detach the mount with jericho umount, and mount the \
             volume again"
        ),
        Errno::NOENT => format!("{path} does not exist"),
        Errno::ACCESS => format!("{path}: permission denied; ask its owner or root"),
        Errno::PERM => format!("{path}: only its owner and root may place it"),
        Errno::ROFS => format!("{path} is on a volume that is mounted read-only"),
        errno => format!("{path}: {}", std::io::Error::from(errno)),
    })
}

/// Returns the counters of the mount that contains `path`. Counters of many slices come in pages.
pub fn stat(path: &Path) -> Result<Stat, Failure> {
    let mut all: Stat = get(path, STAT)?;
    let longest = |page: &Stat| {
        let lengths = [page.slices.len(), page.nodes.len(), page.clients.len()];
        lengths.into_iter().max().unwrap_or(0)
    };
    let mut last = longest(&all);
    let mut next = STAT_SLICES_PER_PAGE;
    while last == STAT_SLICES_PER_PAGE {
        let page: Stat = get(path, &format!("{STAT}+{next}"))?;
        last = longest(&page);
        next += STAT_SLICES_PER_PAGE;
        all.slices.extend(page.slices);
        all.nodes.extend(page.nodes);
        all.clients.extend(page.clients);
    }
    Ok(all)
}

/// Makes everything written to the mount that contains `path` durable.
pub fn sync(path: &Path) -> Result<(), Failure> {
    // The kernel holds the bytes of mappings. This call makes it write them to the daemon, and does nothing more on a
    // FUSE mount.
    let directory =
        std::fs::File::open(path).context(format_args!("cannot open {}", path.display()))?;
    let mapped = rustix::fs::syncfs(&directory);
    let mut nothing = [0u8; 8];
    rustix::fs::lgetxattr(path, SYNC, &mut nothing[..]).map_err(|errno| explain(path, errno))?;
    mapped.map_err(|errno| explain(path, errno))
}

/// Discards the free space of the volume that contains `path`, in pieces of at least `minimum` bytes. Returns the number of
/// bytes.
pub fn trim(path: &Path, minimum: u64) -> Result<u64, Failure> {
    // Checks first that this is a mount, so that an error below concerns the trim.
    stat(path)?;
    let (mut from, mut bytes) = (0, 0);
    loop {
        let mut value = [0u8; 4096];
        // Asks for one part at a time, so that this command can be interrupted.
        let name = format!("{TRIM}+{from}+{minimum}");
        let length = rustix::fs::lgetxattr(path, name.as_str(), &mut value[..]).map_err(
            |errno| match errno {
                Errno::OPNOTSUPP => Failure::new(format!(
                    "nothing can be given back: the volume of {} has no block device that can discard, and its files keep \
                     their space unless it was formatted with --sparse",
                    path.display()
                )),
                Errno::PERM => Failure::new(format!(
                    "{}: only root and the user who mounted the volume may trim it",
                    path.display()
                )),
                errno => explain(path, errno),
            },
        )?;
        let part: Trim = serde_json::from_slice(&value[..length])
            .map_err(|error| not_understood(path, &error))?;
        bytes += part.bytes;
        match part.next {
            Some(next) => from = next,
            None => return Ok(bytes),
        }
    }
}

/// Grows the volume that contains `path`.
pub fn grow(path: &Path, request: &GrowRequest) -> Result<Grow, Failure> {
    // Checks first that this is a mount, so that an error below concerns the growth.
    stat(path)?;
    let mut value = vec![0u8; VALUE_BYTES_MAX];
    let length = rustix::fs::lgetxattr(path, grow_name(request).as_str(), &mut value[..]).map_err(
        |errno| match errno {
            Errno::PERM => Failure::new(format!(
                "{}: only root and the user who mounted the volume may grow it",
                path.display()
            )),
            Errno::NODATA => Failure::new(format!(
                "the daemon of {} is older than this program and cannot grow a volume; unmount it and mount it again",
                path.display()
            )),
            errno => explain(path, errno),
        },
    )?;
    serde_json::from_slice(&value[..length]).map_err(|error| not_understood(path, &error))
}

/// Adds a device to the volume that contains `path`.
pub fn add(path: &Path, request: &AddRequest) -> Result<Add, Failure> {
    // Checks first that this is a mount, so that an error below concerns the addition.
    stat(path)?;
    let value = serde_json::to_vec(request).context("cannot write the request")?;
    rustix::fs::lsetxattr(path, ADD, &value, XattrFlags::empty()).map_err(|errno| {
        match errno {
            Errno::PERM => Failure::new(format!(
                "{}: only root and the user who mounted the volume may add a device to it",
                path.display()
            )),
            Errno::OPNOTSUPP => Failure::new(format!(
                "the daemon of {} is older than this program and cannot add a device to a mounted volume; unmount it first",
                path.display()
            )),
            errno => explain(path, errno),
        }
    })?;
    get(path, &added_name(request.number))
}

/// Returns where a file is.
pub fn where_is(path: &Path) -> Result<Where, Failure> {
    get(path, WHERE)
}

/// Returns the configured place of a file.
pub fn place(path: &Path) -> Result<InodePlacement, Failure> {
    get(path, PLACE)
}

/// Sets the place of files that will be created below `path`. `place` is `node:N` or `slice:N`.
pub fn set_place(path: &Path, place: &str) -> Result<(), Failure> {
    set(path, PLACE, place)
}

/// Sets when threads migrate to the files at or below `path`: a policy's name or `inherit`.
pub fn set_threads(path: &Path, policy: &str) -> Result<(), Failure> {
    set(path, THREADS, policy)
}

/// Moves a file. Returns when it is at the new place.
pub fn move_to(path: &Path, place: &str) -> Result<(), Failure> {
    set(path, MOVE, place)
}

fn set(path: &Path, name: &str, value: &str) -> Result<(), Failure> {
    rustix::fs::lsetxattr(path, name, value.as_bytes(), XattrFlags::empty())
        .map_err(|errno| explain(path, errno))
}
