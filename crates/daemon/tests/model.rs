//! Runs random operations, remounts, moves and power cuts on files, and compares them with plain byte vectors.
//!
//! After a power cut, bytes that were synced and not touched since are unchanged.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use jericho_daemon::{Handle, Mounted, OpenOptions, WriteMode, WriteSync};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, ROOT, SetAttr};
use jericho_sim::SimDevice;
use jericho_storage::Device;
use jericho_topology::Topology;
use jericho_volume::{FormatOptions, OpenMode, Volume};
use proptest::prelude::*;

const FILES: usize = 3;
const SIZE_MAX: u64 = 4 << 20;
const VOLUME_BYTES: u64 = 96 << 20;
const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    umask: 0o022,
};

#[derive(Clone, Debug)]
enum Op {
    Write {
        file: usize,
        offset: u64,
        len: usize,
        byte: u8,
        sync: bool,
    },
    Read {
        file: usize,
        offset: u64,
        len: usize,
    },
    Truncate {
        file: usize,
        size: u64,
    },
    /// Mode of fallocate: 0, 1 (keep size), 3 (punch), 0x10 (zero).
    Allocate {
        file: usize,
        mode: i32,
        offset: u64,
        len: u64,
    },
    Sync {
        file: usize,
    },
    Move {
        file: usize,
        slice: u16,
    },
    Remount,
    /// Discards all free space. If the filesystem took used space for free, its bytes would then read as garbage.
    Trim,
    PowerCut {
        seed: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let file = 0..FILES;
    // Half of all offsets are at page boundaries, where the edge cases are.
    let offset =
        || (0..SIZE_MAX, any::<bool>()).prop_map(|(o, round)| if round { o & !4095 } else { o });
    let len = || prop_oneof![1usize..5000, Just(4096), Just(8192), 1usize..400_000];
    prop_oneof![
        8 => (file.clone(), offset(), len(), any::<u8>(), prop::bool::weighted(0.1))
            .prop_map(|(file, offset, len, byte, sync)| Op::Write { file, offset, len, byte, sync }),
        6 => (file.clone(), offset(), len()).prop_map(|(file, offset, len)| Op::Read { file, offset, len }),
        2 => (file.clone(), offset()).prop_map(|(file, size)| Op::Truncate { file, size }),
        3 => (file.clone(), prop_oneof![Just(0), Just(1), Just(3), Just(0x10)], offset(), len())
            .prop_map(|(file, mode, offset, len)| Op::Allocate { file, mode, offset, len: len as u64 }),
        2 => file.clone().prop_map(|file| Op::Sync { file }),
        1 => (file, 0..2u16).prop_map(|(file, slice)| Op::Move { file, slice }),
        1 => Just(Op::Remount),
        1 => Just(Op::Trim),
        1 => any::<u64>().prop_map(|seed| Op::PowerCut { seed }),
    ]
}

#[derive(Default)]
struct Model {
    bytes: Vec<u8>,
    synced: Vec<u8>,
    /// Ranges that may differ from `synced` after a power cut.
    touched: Vec<Range<u64>>,
}

impl Model {
    fn touch(&mut self, range: Range<u64>) {
        self.touched.push(range);
    }

    fn fill(&mut self, offset: u64, len: usize, byte: u8, extend: bool) {
        let end = offset as usize + len;
        if extend && self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        let end = end.min(self.bytes.len());
        let start = (offset as usize).min(end);
        self.bytes[start..end].fill(byte);
        self.touch(offset..offset + len as u64);
    }
}

struct Bed {
    device: Arc<SimDevice>,
    /// `None` only while it is replaced.
    mounted: Option<Arc<Mounted>>,
    handles: Vec<Arc<Handle>>,
    models: Vec<Model>,
}

fn mount(device: &Arc<SimDevice>) -> Arc<Mounted> {
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let volume = Volume::open_from_devices(devices, OpenMode::WRITE).unwrap();
    let options = OpenOptions {
        threads: Default::default(),
        with_parent: false,
        move_costs: Default::default(),
        fast_path: Default::default(),
        keeper: None,
        volume: PathBuf::from("simulated"),
        read_only: false,
        devices: vec![],
        force: false,
        // The cache is smaller than the files together, so pages are evicted and read again.
        cache_bytes: Some(8 << 20),
        spill_bytes: 0,
        topology: Topology::from_spec("virtual:2").unwrap(),
    };
    Mounted::open_volume(volume, &options).unwrap()
}

fn handles(mounted: &Mounted) -> Vec<Arc<Handle>> {
    let open = |i: usize| {
        let attr = mounted
            .fs()
            .lookup(ROOT, format!("f{i}").as_bytes())
            .unwrap();
        mounted.open_file(attr.ino, true).unwrap()
    };
    (0..FILES).map(open).collect()
}

fn answer<T>(rx: &mpsc::Receiver<T>) -> T {
    rx.recv_timeout(Duration::from_secs(120))
        .expect("an operation never ended")
}

impl Bed {
    fn new() -> Bed {
        let device = Arc::new(SimDevice::new("sim", VOLUME_BYTES).with_discards());
        let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
        let options = FormatOptions {
            slices: Some(2),
            ..FormatOptions::default()
        };
        format_devices(&devices, &[PathBuf::from("sim")], &options).unwrap();
        let mounted = mount(&device);
        for i in 0..FILES {
            let kind = jericho_fs::types::Kind::File;
            mounted
                .fs()
                .mknod(ROOT, format!("f{i}").as_bytes(), kind, 0o644, 0, CALLER)
                .unwrap();
        }
        mounted.fs().sync_all().unwrap();
        let handles = handles(&mounted);
        let models = (0..FILES).map(|_| Model::default()).collect();
        Bed {
            device,
            mounted: Some(mounted),
            handles,
            models,
        }
    }

    fn mounted(&self) -> &Arc<Mounted> {
        self.mounted.as_ref().expect("mounted")
    }

    fn read(&self, file: usize, offset: u64, len: usize) -> Vec<u8> {
        let (tx, rx) = mpsc::channel();
        let reply = move |read: jericho_fs::Result<usize>, buffer: Vec<u8>| {
            tx.send(read.map(|len| buffer[..len].to_vec())).unwrap();
        };
        self.mounted().read(
            &self.handles[file],
            offset,
            len as u32,
            false,
            vec![],
            reply,
        );
        answer(&rx).unwrap()
    }

    fn check(&self, file: usize, offset: u64, len: usize) {
        let bytes = &self.models[file].bytes;
        let start = (offset as usize).min(bytes.len());
        let end = (start + len).min(bytes.len());
        let got = self.read(file, offset, len);
        assert_eq!(
            got.len(),
            end - start,
            "file {file}: length of a read at {offset}"
        );
        if let Some(at) = got.iter().zip(&bytes[start..end]).position(|(a, b)| a != b) {
            panic!(
                "file {file} byte {}: got {}, want {}",
                start + at,
                got[at],
                bytes[start + at]
            );
        }
    }

    fn check_all(&self) {
        for file in 0..FILES {
            let size = self.mounted().file(&self.handles[file]).size();
            assert_eq!(
                size,
                self.models[file].bytes.len() as u64,
                "size of file {file}"
            );
            for offset in (0..SIZE_MAX + 400_000).step_by(1 << 20) {
                self.check(file, offset, 1 << 20);
            }
        }
    }

    #[expect(
        clippy::too_many_lines,
        reason = "a table: one entry for each operation"
    )]
    fn apply(&mut self, op: &Op) {
        let fs = self.mounted().fs().clone();
        match *op {
            Op::Write {
                file,
                offset,
                len,
                byte,
                sync,
            } => {
                let (tx, rx) = mpsc::channel();
                let sync = if sync { WriteSync::Full } else { WriteSync::No };
                let mode = WriteMode {
                    sync,
                    ..WriteMode::PLAIN
                };
                let reply = move |n: jericho_fs::Result<u32>| tx.send(n).unwrap();
                let data = vec![byte; len];
                let (mounted, handle) = (self.mounted(), &self.handles[file]);
                // A write of an odd byte is made as a thread of the FUSE ring makes it: as much as possible without waiting, then
                // the rest.
                let done = match byte % 2 {
                    0 => 0,
                    _ => mounted.try_write(handle, offset, &data, mode),
                };
                if done == 0 || done < len {
                    let at = offset + done as u64;
                    mounted.write(handle, at, &data[done..], mode, reply);
                    assert_eq!(answer(&rx).unwrap() as usize, len - done);
                }
                let model = &mut self.models[file];
                let old = model.bytes.len() as u64;
                model.fill(offset, len, byte, true);
                if old < offset {
                    model.touch(old..offset);
                }
                if sync == WriteSync::Full {
                    model.synced = model.bytes.clone();
                    model.touched.clear();
                }
            }
            Op::Read { file, offset, len } => self.check(file, offset, len),
            Op::Truncate { file, size } => {
                let ino = self.mounted().file(&self.handles[file]).ino();
                let set = SetAttr {
                    size: Some(size),
                    ..SetAttr::default()
                };
                assert_eq!(fs.setattr(ino, set, CALLER).unwrap().size, size);
                let model = &mut self.models[file];
                model.touch(size.min(model.bytes.len() as u64)..u64::MAX);
                model.bytes.resize(size as usize, 0);
            }
            Op::Allocate {
                file,
                mode,
                offset,
                len,
            } => {
                fs.fallocate(self.mounted().file(&self.handles[file]), mode, offset, len)
                    .unwrap();
                let model = &mut self.models[file];
                let old = model.bytes.len() as u64;
                match mode {
                    3 => model.fill(offset, len as usize, 0, false),
                    0x10 => model.fill(offset, len as usize, 0, true),
                    0 if old < offset + len => model.bytes.resize((offset + len) as usize, 0),
                    _ => {}
                }
                model.touch(old.min(offset)..offset + len);
            }
            Op::Sync { file } => {
                let (tx, rx) = mpsc::channel();
                let done = Box::new(move |result| tx.send(result).unwrap());
                fs.fsync_blocking(self.mounted().file(&self.handles[file]), false, done);
                answer(&rx).unwrap();
                let model = &mut self.models[file];
                model.synced = model.bytes.clone();
                model.touched.clear();
            }
            Op::Move { file, slice } => {
                fs.move_to(self.mounted().file(&self.handles[file]).ino(), slice)
                    .unwrap();
            }
            Op::Remount => {
                self.handles
                    .iter()
                    .for_each(|h| self.mounted().close_file(h));
                self.mounted().close().unwrap();
                self.restart(self.device.clone());
                self.check_all();
                for model in &mut self.models {
                    model.synced = model.bytes.clone();
                    model.touched.clear();
                }
            }
            Op::Trim => {
                let fs = self.mounted().fs().clone();
                fs.trim(0..u64::MAX, 0, None).unwrap();
            }
            Op::PowerCut { seed } => {
                self.device.cut_power();
                let device = Arc::new(self.device.crash(seed));
                self.restart(device);
                for file in 0..FILES {
                    let size = self.mounted().file(&self.handles[file]).size();
                    let mut now = vec![];
                    while (now.len() as u64) < size {
                        now.extend(self.read(file, now.len() as u64, 1 << 20));
                    }
                    let model = &mut self.models[file];
                    let same = |at: u64| {
                        model.touched.iter().any(|r| r.contains(&at))
                            || now.get(at as usize) == model.synced.get(at as usize)
                    };
                    let wrong = (0..model.synced.len() as u64).find(|at| !same(*at));
                    assert_eq!(
                        wrong, None,
                        "file {file}: a synced byte changed in the power cut"
                    );
                    if model.touched.is_empty() {
                        assert_eq!(now.len(), model.synced.len(), "size of a synced file");
                    }
                    model.synced = now.clone();
                    model.bytes = now;
                    model.touched.clear();
                }
            }
        }
    }

    fn restart(&mut self, device: Arc<SimDevice>) {
        self.handles.clear();
        self.device = device;
        // Drops the old mount first: its threads must not reach a device that the new one uses.
        self.mounted = None;
        self.mounted = Some(mount(&self.device));
        self.handles = handles(self.mounted());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, max_shrink_iters: 200, ..ProptestConfig::default() })]
    #[test]
    fn files_are_what_was_written_through_remounts_moves_and_power_cuts(
        ops in prop::collection::vec(op(), 1..80)
    ) {
        let mut bed = Bed::new();
        for op in &ops {
            bed.apply(op);
        }
        bed.check_all();
        bed.mounted().close().unwrap();
    }
}

#[test]
fn a_synced_write_survives_a_power_cut() {
    for seed in 0..20 {
        let mut bed = Bed::new();
        let write = |offset, sync| Op::Write {
            file: 0,
            offset,
            len: 10,
            byte: 84,
            sync,
        };
        for op in [
            write(0, true),
            write(4096, false),
            Op::Remount,
            write(0, true),
            Op::PowerCut { seed },
        ] {
            bed.apply(&op);
        }
        bed.check_all();
    }
}
