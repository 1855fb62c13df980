//! The sizes of the CPUs' caches, from sysfs. Buffers must exceed them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// What a CPU is taken to have if the kernel does not tell.
const UNKNOWN_BYTES: u64 = 32 << 20;
/// The smallest level that counts. A level 1 cache is too small to matter.
const LEVEL_MIN: u32 = 2;

/// Returns the size of all caches together that any of these CPUs uses. Caches that CPUs share count once.
pub(crate) fn bytes_of(root: &Path, cpus: &[u32]) -> u64 {
    let mut caches = BTreeMap::new();
    for cpu in cpus {
        let dir = root.join(format!("sys/devices/system/cpu/cpu{cpu}/cache"));
        let Ok(entries) = fs::read_dir(dir) else {
            continue;
        };
        for entry in entries.flatten() {
            if let Some((key, bytes)) = cache(&entry.path()) {
                caches.insert(key, bytes);
            }
        }
    }
    match caches.values().sum() {
        0 => UNKNOWN_BYTES,
        sum => sum,
    }
}

/// Reads a cache: its level and the CPUs that share it, and its size. Returns `None` for one that holds no data or does not count.
fn cache(dir: &Path) -> Option<((u32, String), u64)> {
    let read = |name| Some(fs::read_to_string(dir.join(name)).ok()?.trim().to_owned());
    let level = read("level")?.parse().ok()?;
    if level < LEVEL_MIN || read("type")? == "Instruction" {
        return None;
    }
    let kib: u64 = read("size")?.strip_suffix('K')?.parse().ok()?;
    Some(((level, read("shared_cpu_list")?), kib.checked_mul(1024)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_caches_count_once_and_small_ones_do_not_count() {
        let root = tempfile::tempdir().unwrap();
        let add = |cpu: u32, index: u32, level: &str, kind: &str, size: &str, shared: &str| {
            let dir = format!("sys/devices/system/cpu/cpu{cpu}/cache/index{index}");
            let dir = root.path().join(dir);
            fs::create_dir_all(&dir).unwrap();
            for (name, text) in [("level", level), ("type", kind), ("size", size)] {
                fs::write(dir.join(name), format!("{text}\n")).unwrap();
            }
            fs::write(dir.join("shared_cpu_list"), shared).unwrap();
        };
        for cpu in [0, 1] {
            add(cpu, 0, "1", "Data", "32K", &cpu.to_string());
            add(cpu, 2, "2", "Unified", "512K", &cpu.to_string());
            add(cpu, 3, "3", "Unified", "32768K", "0-1");
        }
        let bytes = |cpus: &[u32]| bytes_of(root.path(), cpus);
        assert_eq!(bytes(&[0]), (512 << 10) + (32 << 20));
        assert_eq!(bytes(&[0, 1]), (1 << 20) + (32 << 20));
        assert_eq!(bytes(&[7]), UNKNOWN_BYTES);
    }
}
