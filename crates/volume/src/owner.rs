//! The owner record: the host and process that have a volume mounted for writing. Machines that do not see each other's locks
//! rely on it. `docs/formats/volume.md`, "One user at a time", lists the cases.

use std::path::Path;

use jericho_format::superblock::{FLAG_DIRTY, OwnerRecord, SuperblockHead};
use siphasher::sip::SipHasher24;
use zerocopy::FromZeros;
use zerocopy::byteorder::little_endian::{U16, U32, U64};

/// The host and process that open a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Identity {
    boot_id: [u8; 16],
    machine_id: Vec<u8>,
    host: Vec<u8>,
    pid: u32,
    started: u64,
}

/// The result of judging a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// No process has the volume.
    Free,
    /// A process of this machine has the volume.
    Here(u32),
    /// Another machine has the volume: its name, and the process there.
    Elsewhere(String, u32),
}

/// Returns the record of this process.
pub(crate) fn record(hash_seed: &[u8; 16]) -> OwnerRecord {
    Identity::of_this_process(Path::new("/")).record(hash_seed)
}

/// Judges the record in the head of a superblock.
pub(crate) fn judge(head: &SuperblockHead) -> Verdict {
    let root = Path::new("/");
    let me = Identity::of_this_process(root);
    if head.flags.get() & FLAG_DIRTY == 0 {
        return Verdict::Free;
    }
    me.judge(&head.owner, &head.hash_seed, |pid| started(root, pid))
}

impl Identity {
    fn of_this_process(root: &Path) -> Identity {
        let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
        let machine_id = text("etc/machine-id").trim().as_bytes().to_vec();
        let pid = std::process::id();
        Identity {
            boot_id: uuid(&text("proc/sys/kernel/random/boot_id")),
            // A shorter text ("uninitialized", or the empty file of an image) does not identify a machine.
            machine_id: if machine_id.len() == 32 {
                machine_id
            } else {
                vec![]
            },
            host: text("proc/sys/kernel/hostname").trim().as_bytes().to_vec(),
            pid,
            started: started(root, pid).unwrap_or(0),
        }
    }

    fn machine(&self, hash_seed: &[u8; 16]) -> u64 {
        match &*self.machine_id {
            [] => 0,
            id => SipHasher24::new_with_key(hash_seed).hash(id).max(1),
        }
    }

    fn record(&self, hash_seed: &[u8; 16]) -> OwnerRecord {
        let mut record = OwnerRecord::new_zeroed();
        record.boot_id = self.boot_id;
        record.machine = U64::new(self.machine(hash_seed));
        record.started = U64::new(self.started);
        record.pid = U32::new(self.pid);
        let host_bytes = self.host.len().min(record.host.len());
        record.host[..host_bytes].copy_from_slice(&self.host[..host_bytes]);
        record.host_bytes = U16::new(host_bytes as u16);
        record
    }

    fn judge(
        &self,
        record: &OwnerRecord,
        hash_seed: &[u8; 16],
        started: impl Fn(u32) -> Option<u64>,
    ) -> Verdict {
        if record.boot_id == [0; 16] {
            return Verdict::Free;
        }
        let pid = record.pid.get();
        if record.boot_id == self.boot_id {
            let lives = pid != self.pid && started(pid) == Some(record.started.get());
            return if lives {
                Verdict::Here(pid)
            } else {
                Verdict::Free
            };
        }
        let mine = self.record(hash_seed);
        let same = match (record.machine.get(), mine.machine.get()) {
            (0, _) | (_, 0) => host(record) == host(&mine),
            (theirs, ours) => theirs == ours,
        };
        if same {
            return Verdict::Free;
        }
        Verdict::Elsewhere(String::from_utf8_lossy(host(record)).into_owned(), pid)
    }
}

fn host(record: &OwnerRecord) -> &[u8] {
    let bytes = usize::from(record.host_bytes.get()).min(record.host.len());
    &record.host[..bytes]
}

/// Returns the 16 bytes of a UUID given as text; zeros for any other text.
fn uuid(text: &str) -> [u8; 16] {
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes()
}

/// Returns the start time of a process in ticks since boot (field 22 of its stat), or `None` if the process does not exist.
fn started(root: &Path, pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(root.join(format!("proc/{pid}/stat"))).ok()?;
    // The name, in parentheses, may contain any character.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let is_dead = matches!(fields.next()?, "Z" | "X");
    if is_dead {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: [u8; 16] = [7; 16];

    fn someone() -> Identity {
        Identity {
            boot_id: [1; 16],
            machine_id: vec![b'a'; 32],
            host: b"first".to_vec(),
            pid: 100,
            started: 5,
        }
    }

    #[test]
    fn an_owner_of_this_boot_counts_while_its_process_lives() {
        let (owner, mut me) = (someone(), someone());
        me.pid = 101;
        let record = owner.record(&SEED);
        let judge = |started| me.judge(&record, &SEED, |_| started);
        assert_eq!(judge(Some(5)), Verdict::Here(100));
        // Another process has the pid now.
        assert_eq!(judge(Some(6)), Verdict::Free);
        assert_eq!(judge(None), Verdict::Free);
        // A process does not block itself.
        assert_eq!(owner.judge(&record, &SEED, |_| Some(5)), Verdict::Free);
    }

    #[test]
    fn an_owner_before_a_reboot_is_gone_and_one_elsewhere_is_not() {
        let record = someone().record(&SEED);
        let judge = |me: &Identity| me.judge(&record, &SEED, |_| None);
        let rebooted = Identity {
            boot_id: [2; 16],
            host: b"renamed".to_vec(),
            ..someone()
        };
        assert_eq!(judge(&rebooted), Verdict::Free);
        let other = Identity {
            machine_id: vec![b'b'; 32],
            ..rebooted.clone()
        };
        let elsewhere = Verdict::Elsewhere("first".into(), 100);
        assert_eq!(judge(&other), elsewhere);
        // Without a machine identity, the host name decides.
        let nameless = |host: &[u8]| Identity {
            machine_id: vec![],
            host: host.to_vec(),
            ..rebooted.clone()
        };
        assert_eq!(judge(&nameless(b"first")), Verdict::Free);
        assert_eq!(judge(&nameless(b"second")), elsewhere);
        assert_eq!(
            other.judge(&OwnerRecord::new_zeroed(), &SEED, |_| None),
            Verdict::Free
        );
    }

    #[test]
    fn this_process_is_found_by_its_record() {
        let me = Identity::of_this_process(Path::new("/"));
        assert_ne!(me.boot_id, [0; 16]);
        assert_eq!(started(Path::new("/"), me.pid), Some(me.started));
        let other = Identity {
            pid: 0,
            ..me.clone()
        };
        let verdict = other.judge(&me.record(&SEED), &SEED, |pid| started(Path::new("/"), pid));
        assert_eq!(verdict, Verdict::Here(me.pid));
    }
}
