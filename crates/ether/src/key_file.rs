//! Reads the key that a client and its targets share from a file.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use jericho_remote::{Key, NoKey};
use jericho_sys::process;
use zeroize::Zeroizing;

/// Permission bits that let every user read a file, or others than its owner change it.
const TOO_OPEN: u32 = 0o026;
/// How the text of a key begins.
const KEY_START: &str = "jericho-key:";
/// More bytes than a file with a key has.
const FILE_BYTES_MAX: u64 = 4096;

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read.
    #[error("cannot read the key in {}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
    /// Every user of this host can read the file, or others than its owner can change it.
    #[error(
        "other users can read or change the key in {path}: if nobody has read it, run `chmod 600 {path}`, otherwise make a new one"
    )]
    Open {
        /// The file.
        path: String,
    },
    /// The file is a pipe or another thing that cannot be read again.
    #[error("{0} is no file: a daemon reads the key again later")]
    Kind(String),
    /// The key itself was given, which other users see in the list of processes.
    #[error("the name of a file with the key is needed, not the key")]
    Key,
    /// The file has something else.
    #[error("{} has no key: {source}", .path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// What a key looks like.
        source: NoKey,
    },
    /// The kernel gives no random numbers.
    #[error("cannot get random numbers for a key: {0}")]
    Random(io::Error),
}

/// Reads the key in a file. Refuses one that other users can read or change.
pub fn read_key(path: &Path) -> Result<Key, KeyError> {
    let failed = |source| KeyError::Io {
        path: path.to_owned(),
        source,
    };
    if path.to_string_lossy().trim_start().starts_with(KEY_START) {
        return Err(KeyError::Key);
    }
    // Before it is opened: that of a pipe without a writer would wait.
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() {
        return Err(KeyError::Kind(path.display().to_string()));
    }
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.permissions().mode() & TOO_OPEN != 0 {
        let path = path.display().to_string();
        return Err(KeyError::Open { path });
    }
    // It does not grow: that would leave copies of the key in memory.
    let mut text = Zeroizing::new(String::with_capacity(FILE_BYTES_MAX as usize + 1));
    (file.take(FILE_BYTES_MAX).read_to_string(&mut text)).map_err(failed)?;
    text.parse().map_err(|source| KeyError::Text {
        path: path.to_owned(),
        source,
    })
}

/// Returns a new key.
pub fn new_key() -> Result<Key, KeyError> {
    let mut bytes = Zeroizing::new([0; 32]);
    for part in bytes.chunks_exact_mut(8) {
        let random = process::random_u64().map_err(KeyError::Random)?;
        part.copy_from_slice(&random.to_le_bytes());
    }
    Ok(Key::new(*bytes))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};

    use super::*;

    #[test]
    fn a_key_is_read_from_a_file_that_not_every_user_can_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        let key = new_key().unwrap();
        assert_ne!(key.fingerprint(), new_key().unwrap().fingerprint());
        fs::write(&path, format!("{}\n", *key.to_text())).unwrap();
        for (mode, is_refused) in [
            (0o600, false),
            (0o640, false),
            (0o644, true),
            (0o602, true),
            (0o660, true),
        ] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            match read_key(&path) {
                Ok(read) => assert_eq!(read.fingerprint(), key.fingerprint()),
                Err(error) => assert!(matches!(error, KeyError::Open { .. }), "{error}"),
            }
            assert_eq!(read_key(&path).is_err(), is_refused, "{mode:o}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "something").unwrap();
        assert!(matches!(read_key(&path), Err(KeyError::Text { .. })));
        fs::write(&path, [0xff; 10_000]).unwrap();
        assert!(matches!(read_key(&path), Err(KeyError::Io { .. })));
        assert!(matches!(read_key(directory.path()), Err(KeyError::Kind(_))));
        let text = read_key(Path::new(&*key.to_text())).unwrap_err();
        assert!(!text.to_string().contains(&key.to_text()[12..]));
        let missing = read_key(&directory.path().join("none"));
        assert!(matches!(missing, Err(KeyError::Io { .. })));
    }
}
