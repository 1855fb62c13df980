//! The durable record of an export's owner: rule 11 of `docs/formats/wire.md`.
//!
//! A text file with one line: `1 CLIENT INSTANCE attached|left DEVICE`, numbers in hexadecimal. A record of another device, or one that cannot be
//! read, counts as none: then no initiator that comes back may replay. The target holds a lock beside it, so that two targets with one name on this
//! host do not overwrite each other's record.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use jericho_remote::Owner;

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

    /// Reads the record. Returns `None` if there is none of this device.
    pub fn read(&self) -> io::Result<Option<Owner>> {
        match fs::read_to_string(&self.path) {
            Ok(text) => Ok(parse(&text, &self.device)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Replaces the record durably.
    pub fn write(&self, owner: &Owner) -> io::Result<()> {
        let new = self.new_path();
        let mut file = File::create(&new)?;
        file.write_all(text_of(owner, &self.device).as_bytes())?;
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

fn text_of(owner: &Owner, device: &str) -> String {
    let state = match owner.is_attached {
        true => "attached",
        false => "left",
    };
    let (client, instance) = (
        u128::from_be_bytes(owner.client),
        u128::from_be_bytes(owner.instance),
    );
    format!("1 {client:032x} {instance:032x} {state} {device}\n")
}

fn parse(text: &str, device: &str) -> Option<Owner> {
    let mut parts = text.strip_suffix('\n')?.splitn(5, ' ');
    if parts.next() != Some("1") {
        return None;
    }
    let mut id = || Some(u128::from_str_radix(parts.next()?, 16).ok()?.to_be_bytes());
    let (client, instance) = (id()?, id()?);
    let is_attached = match parts.next()? {
        "attached" => true,
        "left" => false,
        _ => return None,
    };
    (parts.next() == Some(device)).then_some(Owner {
        client,
        instance,
        is_attached,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_only_for_its_device() {
        let dir = tempfile::tempdir().unwrap();
        let record = OwnerRecord::open(&dir.path().join("a"), "data", "/dev/x 4096").unwrap();
        assert_eq!(record.read().unwrap(), None);
        let mut owner = Owner {
            client: [7; 16],
            instance: [255; 16],
            is_attached: true,
        };
        for is_attached in [true, false] {
            owner.is_attached = is_attached;
            record.write(&owner).unwrap();
            assert_eq!(record.read().unwrap(), Some(owner));
        }
        let taken = OwnerRecord::open(&dir.path().join("a"), "data", "/dev/x 4096");
        assert_eq!(taken.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let path = record.path().to_owned();
        drop(record);
        let other = OwnerRecord::open(&dir.path().join("a"), "data", "/dev/y 4096").unwrap();
        assert_eq!(other.read().unwrap(), None);
        drop(other);
        let record = OwnerRecord::open(&dir.path().join("a"), "data", "/dev/x 4096").unwrap();
        assert_eq!(record.path(), path);
        for text in [
            "",
            "1 zz 00 left /dev/x 4096\n",
            "2 0 0 left /dev/x 4096\n",
            "1 0 0 left",
        ] {
            fs::write(record.path(), text).unwrap();
            assert_eq!(record.read().unwrap(), None, "{text}");
        }
    }
}
