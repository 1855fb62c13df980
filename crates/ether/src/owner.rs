//! The durable record of an export's owner: rule 11 of `docs/formats/wire.md`.
//!
//! A text file with one line: `2 CLIENT INSTANCE attached|left LABEL DEVICE`, numbers in hexadecimal. LABEL is the UUID in the device's Jericho label, or `-`
//! if the device has none; a record of version 1 has no LABEL. A record of another device, or one that cannot be
//! read, counts as none: then no initiator that comes back may replay. Another disk may have the device's name after a restart of the host, so the label
//! counts, too. The target holds a lock beside it, so that two targets with one name on this
//! host do not overwrite each other's record.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use jericho_format::PAGE_BYTES;
use jericho_format::label::{Label, LabelState};
use jericho_remote::Owner;
use jericho_storage::Device;

/// UUID of a device, in its label.
type Uuid = [u8; 16];

/// Where the record of an export is.
#[derive(Debug)]
pub(crate) struct OwnerRecord {
    path: PathBuf,
    /// Closing it ends the lock.
    _lock: File,
    /// Tells the device from another one that is served under the same name.
    device: String,
}

impl OwnerRecord {
    /// Returns the record of an export in a directory, which is created if it is missing. Fails with EWOULDBLOCK if another target has it. Also
    /// fails if nothing can be written to the directory.
    pub fn open(directory: &Path, export: &str, device: &str) -> io::Result<OwnerRecord> {
        fs::create_dir_all(directory)?;
        let lock = File::create(directory.join(format!("{export}.lock")))?;
        lock.try_lock()?;
        let record = OwnerRecord {
            path: directory.join(format!("{export}.owner")),
            _lock: lock,
            device: device.replace('\n', " "),
        };
        // A directory without room or permission shows now, not when the first initiator comes.
        let mut probe = File::create(record.new_path())?;
        probe.write_all(&[0; 256])?;
        probe.sync_all()?;
        Ok(record)
    }

    fn new_path(&self) -> PathBuf {
        self.path.with_extension("owner.new")
    }

    /// Reads the record. Returns `None` if there is none of this device. `label`: what the device has now (`label_of`).
    pub fn read(&self, label: Option<Uuid>) -> io::Result<Option<Owner>> {
        match fs::read_to_string(&self.path) {
            Ok(text) => Ok(parse(&text, &self.device, label)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Replaces the record durably. `label`: what the device has now (`label_of`).
    pub fn write(&self, owner: &Owner, label: Option<Uuid>) -> io::Result<()> {
        let new = self.new_path();
        let mut file = File::create(&new)?;
        file.write_all(text_of(owner, &self.device, label).as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        let directory = self.path.parent().unwrap_or(Path::new("."));
        File::open(directory)?.sync_all()
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Returns the UUID in the label of a device; `None` if it has no valid label, or cannot be read.
pub(crate) fn label_of(device: &dyn Device) -> Option<Uuid> {
    if device.size_bytes() < PAGE_BYTES {
        return None;
    }
    let mut block = vec![0; PAGE_BYTES as usize];
    device.read_at(0, &mut block).ok()?;
    match Label::decode(&block) {
        LabelState::Valid(label) => Some(label.device_uuid),
        _ => None,
    }
}

fn text_of(owner: &Owner, device: &str, label: Option<Uuid>) -> String {
    let state = match owner.is_attached {
        true => "attached",
        false => "left",
    };
    let hex = |id: [u8; 16]| format!("{:032x}", u128::from_be_bytes(id));
    let (client, instance) = (hex(owner.client), hex(owner.instance));
    let label = label.map_or("-".to_owned(), hex);
    format!("2 {client} {instance} {state} {label} {device}\n")
}

fn parse(text: &str, device: &str, label: Option<Uuid>) -> Option<Owner> {
    let (version, rest) = text.strip_suffix('\n')?.split_once(' ')?;
    let has_label = match version {
        "1" => false,
        "2" => true,
        _ => return None,
    };
    let mut parts = rest.splitn(if has_label { 5 } else { 4 }, ' ');
    let id = |text: &str| Some(u128::from_str_radix(text, 16).ok()?.to_be_bytes());
    let (client, instance) = (id(parts.next()?)?, id(parts.next()?)?);
    let is_attached = match parts.next()? {
        "attached" => true,
        "left" => false,
        _ => return None,
    };
    let recorded = match has_label.then(|| parts.next()).flatten() {
        None | Some("-") => None,
        Some(text) => Some(id(text)?),
    };
    // The owner may have written the first label after the record.
    let is_same = recorded.is_none() || recorded == label;
    (parts.next() == Some(device) && is_same).then_some(Owner {
        client,
        instance,
        is_attached,
    })
}

#[cfg(test)]
mod tests {
    use jericho_sim::SimDevice;

    use super::*;

    const OWNER: Owner = Owner {
        client: [7; 16],
        instance: [255; 16],
        is_attached: true,
    };

    #[test]
    fn a_record_is_read_as_it_was_written_and_only_for_its_device() {
        let dir = tempfile::tempdir().unwrap();
        let record = OwnerRecord::open(&dir.path().join("a"), "data", "/dev/x 4096").unwrap();
        assert_eq!(record.read(None).unwrap(), None);
        for is_attached in [true, false] {
            let owner = Owner {
                is_attached,
                ..OWNER
            };
            record.write(&owner, None).unwrap();
            assert_eq!(record.read(None).unwrap(), Some(owner));
        }
        let taken = OwnerRecord::open(&dir.path().join("a"), "data", "/dev/x 4096");
        assert_eq!(taken.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let path = record.path().to_owned();
        drop(record);
        let other = OwnerRecord::open(&dir.path().join("a"), "data", "/dev/y 4096").unwrap();
        assert_eq!(other.read(None).unwrap(), None);
        drop(other);
        let record = OwnerRecord::open(&dir.path().join("a"), "data", "/dev/x 4096").unwrap();
        assert_eq!(record.path(), path);
        for text in [
            "",
            "1 zz 00 left /dev/x 4096\n",
            "3 0 0 left - /dev/x 4096\n",
            "2 0 0 left zz /dev/x 4096\n",
            "2 0 0 left /dev/x 4096\n",
            "1 0 0 left",
        ] {
            fs::write(record.path(), text).unwrap();
            assert_eq!(record.read(None).unwrap(), None, "{text}");
        }
        fs::write(record.path(), "1 0 0 left /dev/x 4096\n").unwrap();
        assert!(record.read(Some([1; 16])).unwrap().is_some());
    }

    #[test]
    fn a_record_is_not_that_of_another_disk_under_the_name_of_the_device() {
        let dir = tempfile::tempdir().unwrap();
        let record = OwnerRecord::open(dir.path(), "data", "/dev/sdb").unwrap();
        let disk = |uuid: u8| {
            let disk = SimDevice::new("sdb", 1 << 20);
            let mut label = Label::new();
            label.device_uuid = [uuid; 16];
            let mut block = vec![0; PAGE_BYTES as usize];
            let bytes = label.encode();
            block[..bytes.len()].copy_from_slice(&bytes);
            disk.write_at(0, &block).unwrap();
            disk
        };
        let (own, other, blank) = (disk(1), disk(2), SimDevice::new("sdb", 1 << 20));
        record.write(&OWNER, label_of(&own)).unwrap();
        assert_eq!(record.read(label_of(&own)).unwrap(), Some(OWNER));
        // Another disk, or the same one after a format.
        assert_eq!(record.read(label_of(&other)).unwrap(), None);
        assert_eq!(record.read(label_of(&blank)).unwrap(), None);
        // The owner has formatted the device.
        record.write(&OWNER, label_of(&blank)).unwrap();
        assert_eq!(record.read(label_of(&own)).unwrap(), Some(OWNER));
    }
}
