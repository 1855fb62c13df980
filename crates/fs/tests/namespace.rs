//! Random operations on names, compared with a model in memory. Over remounts the two agree. After a power cut the volume shows
//! the result of a prefix of the operations, which includes all synced ones.

mod model;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;

use jericho_fs::format::format_devices;
use jericho_fs::types::{Attr, Caller, Ino, Kind, ROOT, SetAttr};
use jericho_fs::{Fs, FsOptions};
use jericho_sim::SimDevice;
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Volume};
use proptest::prelude::*;

use model::{Dump, ENODATA, Model, Node, Row};

const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};
const DEVICE_BYTES: u64 = 64 << 20;

#[derive(Clone, Debug)]
enum Op {
    Create {
        dir: usize,
        name: usize,
        perm: u16,
    },
    Mkdir {
        dir: usize,
        name: usize,
    },
    Symlink {
        dir: usize,
        name: usize,
        target: usize,
    },
    Link {
        from: usize,
        name: usize,
        to: usize,
        new: usize,
    },
    Unlink {
        dir: usize,
        name: usize,
    },
    Rmdir {
        dir: usize,
        name: usize,
    },
    Rename {
        from: usize,
        name: usize,
        to: usize,
        new: usize,
        flags: u32,
    },
    Chmod {
        dir: usize,
        name: usize,
        perm: u16,
    },
    Grow {
        dir: usize,
        name: usize,
        size: u64,
    },
    SetXattr {
        dir: usize,
        name: usize,
        key: usize,
        len: usize,
    },
    RemoveXattr {
        dir: usize,
        name: usize,
        key: usize,
    },
    HoldOpen {
        dir: usize,
        name: usize,
    },
    Sync,
    Remount,
    PowerCut {
        seed: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let dir = || 0..6usize;
    let name = || 0..5usize;
    prop_oneof![
        6 => (dir(), name(), 0..0o1000u16).prop_map(|(dir, name, perm)| Op::Create { dir, name, perm }),
        4 => (dir(), name()).prop_map(|(dir, name)| Op::Mkdir { dir, name }),
        1 => (dir(), name(), name()).prop_map(|(dir, name, target)| Op::Symlink { dir, name, target }),
        2 => (dir(), name(), dir(), name())
            .prop_map(|(from, name, to, new)| Op::Link { from, name, to, new }),
        4 => (dir(), name()).prop_map(|(dir, name)| Op::Unlink { dir, name }),
        2 => (dir(), name()).prop_map(|(dir, name)| Op::Rmdir { dir, name }),
        6 => (dir(), name(), dir(), name(), 0..3u32)
            .prop_map(|(from, name, to, new, flags)| Op::Rename { from, name, to, new, flags }),
        1 => (dir(), name(), 0..0o1000u16).prop_map(|(dir, name, perm)| Op::Chmod { dir, name, perm }),
        1 => (dir(), name(), 0..1_000_000u64).prop_map(|(dir, name, size)| Op::Grow { dir, name, size }),
        2 => (dir(), name(), name(), 0..5000usize)
            .prop_map(|(dir, name, key, len)| Op::SetXattr { dir, name, key, len }),
        1 => (dir(), name(), name()).prop_map(|(dir, name, key)| Op::RemoveXattr { dir, name, key }),
        1 => (dir(), name()).prop_map(|(dir, name)| Op::HoldOpen { dir, name }),
        2 => Just(Op::Sync),
        1 => Just(Op::Remount),
        1 => any::<u64>().prop_map(|seed| Op::PowerCut { seed }),
    ]
}

/// A mounted simulated volume.
struct Mount {
    device: Arc<SimDevice>,
    /// `None` only between two mounts, because the old one must release the device first.
    fs: Option<Arc<Fs>>,
    interval_ms: u64,
    cache: usize,
}

impl Mount {
    fn new(interval_ms: u64, cache: usize) -> Mount {
        let device = Arc::new(SimDevice::new("sim", DEVICE_BYTES));
        let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
        let options = FormatOptions {
            slices: Some(3),
            ..FormatOptions::default()
        };
        format_devices(&devices, &[PathBuf::from("sim")], &options).unwrap();
        let fs = open(&device, interval_ms, cache);
        Mount {
            device,
            fs: Some(fs),
            interval_ms,
            cache,
        }
    }

    fn fs(&self) -> &Arc<Fs> {
        self.fs.as_ref().unwrap()
    }

    fn remount(&mut self) {
        self.fs().close().unwrap();
        self.fs = None;
        self.fs = Some(open(&self.device, self.interval_ms, self.cache));
    }

    fn power_cut(&mut self, seed: u64) {
        self.device.cut_power();
        self.fs = None;
        self.device = Arc::new(self.device.crash(seed));
        self.fs = Some(open(&self.device, self.interval_ms, self.cache));
    }

    fn sync(&self) {
        let (sender, receiver) = channel();
        self.fs()
            .fsync_dir(ROOT, Box::new(move |result| sender.send(result).unwrap()));
        receiver.recv().unwrap().unwrap();
    }

    /// Looks up a path. Drops all references except the last one.
    fn walk(&self, path: &str) -> Result<Attr, i32> {
        let mut attr = self.fs().getattr(ROOT).map_err(|e| e.errno())?;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            attr = self
                .fs()
                .lookup(attr.ino, name.as_bytes())
                .map_err(|e| e.errno())?;
            self.fs().forget(attr.ino, 1);
        }
        Ok(attr)
    }

    fn dump(&self) -> Dump {
        let mut rows: BTreeMap<String, (Ino, Row)> = BTreeMap::new();
        let mut stack = vec![(String::new(), ROOT)];
        while let Some((path, ino)) = stack.pop() {
            let attr = self.fs().getattr(ino).unwrap();
            let mut names = Vec::new();
            if attr.kind == Kind::Directory {
                self.fs()
                    .readdir(ino, 0, &mut |entry| {
                        names.push(entry);
                        true
                    })
                    .unwrap();
                for entry in names.iter().filter(|e| e.name != b"." && e.name != b"..") {
                    let name = String::from_utf8(entry.name.clone()).unwrap();
                    let found = self.fs().lookup(ino, &entry.name).unwrap();
                    self.fs().forget(found.ino, 1);
                    assert_eq!(
                        (found.ino, found.kind),
                        (entry.ino, entry.kind),
                        "{path}/{name}"
                    );
                    stack.push((format!("{path}/{name}"), entry.ino));
                }
            }
            let names = self.fs().listxattr(ino).unwrap();
            let keys = names.split(|b| *b == 0).filter(|key| !key.is_empty());
            let row = Row {
                kind: match attr.kind {
                    Kind::File => "file",
                    Kind::Symlink => "symlink",
                    Kind::Directory => "dir",
                    other => panic!("found a {other:?}, which the test does not create"),
                },
                perm: attr.perm,
                nlink: attr.nlink,
                size: attr.size,
                target: (attr.kind == Kind::Symlink)
                    .then(|| String::from_utf8(self.fs().readlink(ino).unwrap()).unwrap()),
                xattrs: keys
                    .map(|key| {
                        let value = self.fs().getxattr(ino, key).unwrap();
                        (String::from_utf8(key.to_vec()).unwrap(), value)
                    })
                    .collect(),
                same_as: String::new(),
            };
            rows.insert(path, (ino, row));
        }
        let mut first: BTreeMap<Ino, String> = BTreeMap::new();
        for (path, (ino, _)) in &rows {
            first.entry(*ino).or_insert_with(|| path.clone());
        }
        rows.into_iter()
            .map(|(path, (ino, row))| {
                (
                    path,
                    Row {
                        same_as: first[&ino].clone(),
                        ..row
                    },
                )
            })
            .collect()
    }
}

fn open(device: &Arc<SimDevice>, interval_ms: u64, cache: usize) -> Arc<Fs> {
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let volume = Volume::open_from_devices(devices, OpenMode::WRITE).unwrap();
    let options = FsOptions {
        store_cache_bytes: 64 << 20,
        read_only: false,
        inode_cache: cache,
        commit_interval_ms: interval_ms,
    };
    Fs::open(Arc::new(volume), Vec::new(), options).unwrap()
}

fn name_of(index: usize) -> String {
    ["a", "b", "c", "d", "e"][index % 5].into()
}

/// Does an operation on the filesystem and on the model. Returns both results.
#[expect(
    clippy::too_many_lines,
    reason = "a table: one entry for each operation"
)]
fn apply(op: &Op, mount: &Mount, model: &mut Model) -> (Result<(), i32>, Result<(), i32>) {
    let dirs = model.dirs();
    let pick = |index: usize| dirs[index % dirs.len()].clone();
    let fs = mount.fs();
    let ino = |path: &str| mount.walk(path).unwrap().ino;
    let done = |result: jericho_fs::Result<Attr>| match result {
        Ok(attr) => {
            fs.forget(attr.ino, 1);
            Ok(())
        }
        Err(error) => Err(error.errno()),
    };
    let unit = |result: jericho_fs::Result<()>| result.map_err(|e| e.errno());
    match *op {
        Op::Create { dir, name, perm } => {
            let ((path, dir), name) = (pick(dir), name_of(name));
            let real = fs.mknod(ino(&path), name.as_bytes(), Kind::File, perm, 0, CALLER);
            let node = Node::File { size: 0 };
            (done(real), model.make(dir, &name, node, perm & !0o022))
        }
        Op::Mkdir { dir, name } => {
            let ((path, dir), name) = (pick(dir), name_of(name));
            let real = fs.mkdir(ino(&path), name.as_bytes(), 0o777, CALLER);
            let node = Node::Dir {
                entries: BTreeMap::new(),
            };
            (done(real), model.make(dir, &name, node, 0o755))
        }
        Op::Symlink { dir, name, target } => {
            let ((path, dir), name, target) = (pick(dir), name_of(name), name_of(target));
            let real = fs.symlink(ino(&path), name.as_bytes(), target.as_bytes(), CALLER);
            (
                done(real),
                model.make(dir, &name, Node::Symlink { target }, 0o777),
            )
        }
        Op::Link {
            from,
            name,
            to,
            new,
        } => {
            let ((from_path, from), (to_path, to)) = (pick(from), pick(to));
            let (name, new) = (name_of(name), name_of(new));
            let real = match mount.walk(&format!("{from_path}/{name}")) {
                Ok(attr) => done(fs.link(attr.ino, ino(&to_path), new.as_bytes())),
                Err(error) => Err(error),
            };
            (real, model.link(from, &name, to, &new))
        }
        Op::Unlink { dir, name } => {
            let ((path, dir), name) = (pick(dir), name_of(name));
            (
                unit(fs.unlink(ino(&path), name.as_bytes())),
                model.unlink(dir, &name),
            )
        }
        Op::Rmdir { dir, name } => {
            let ((path, dir), name) = (pick(dir), name_of(name));
            (
                unit(fs.rmdir(ino(&path), name.as_bytes())),
                model.rmdir(dir, &name),
            )
        }
        Op::Rename {
            from,
            name,
            to,
            new,
            flags,
        } => {
            let ((from_path, from), (to_path, to)) = (pick(from), pick(to));
            let (name, new) = (name_of(name), name_of(new));
            let (a, b) = (ino(&from_path), ino(&to_path));
            let real = fs.rename(a, name.as_bytes(), b, new.as_bytes(), flags);
            (unit(real), model.rename(from, &name, to, &new, flags))
        }
        Op::Chmod { dir, name, perm } => {
            let ((path, dir), name) = (pick(dir), name_of(name));
            let real = mount.walk(&format!("{path}/{name}")).and_then(|attr| {
                let set = SetAttr {
                    perm: Some(perm),
                    ..SetAttr::default()
                };
                fs.setattr(attr.ino, set, CALLER)
                    .map(|_| ())
                    .map_err(|e| e.errno())
            });
            (
                real,
                model.find(dir, &name).map(|i| model.inodes[i].perm = perm),
            )
        }
        Op::Grow { dir, name, size } => {
            let ((path, dir), name) = (pick(dir), name_of(name));
            let Ok(inode) = model.find(dir, &name) else {
                return (Ok(()), Ok(()));
            };
            let Node::File { size: old } = &mut model.inodes[inode].node else {
                return (Ok(()), Ok(()));
            };
            *old = size;
            let attr = mount.walk(&format!("{path}/{name}")).unwrap();
            let set = SetAttr {
                size: Some(size),
                ..SetAttr::default()
            };
            (
                fs.setattr(attr.ino, set, CALLER)
                    .map(|_| ())
                    .map_err(|e| e.errno()),
                Ok(()),
            )
        }
        Op::SetXattr {
            dir,
            name,
            key,
            len,
        } => {
            let ((path, dir), name) = (pick(dir), name_of(name));
            let (key, value) = (format!("user.{}", name_of(key)), vec![len as u8; len]);
            let real = mount
                .walk(&format!("{path}/{name}"))
                .and_then(|attr| unit(fs.setxattr(attr.ino, key.as_bytes(), &value, 0)));
            let modelled = model.find(dir, &name).map(|i| {
                model.inodes[i].xattrs.insert(key, value);
            });
            (real, modelled)
        }
        Op::RemoveXattr { dir, name, key } => {
            let ((path, dir), name) = (pick(dir), name_of(name));
            let key = format!("user.{}", name_of(key));
            let real = mount
                .walk(&format!("{path}/{name}"))
                .and_then(|attr| unit(fs.removexattr(attr.ino, key.as_bytes())));
            let modelled = model.find(dir, &name).and_then(|i| {
                model.inodes[i]
                    .xattrs
                    .remove(&key)
                    .map(|_| ())
                    .ok_or(ENODATA)
            });
            (real, modelled)
        }
        Op::HoldOpen { dir, name } => {
            // Opens, unlinks, checks that the file is still there, and closes.
            let ((path, dir), name) = (pick(dir), name_of(name));
            let is_file = model
                .find(dir, &name)
                .is_ok_and(|i| matches!(model.inodes[i].node, Node::File { .. }));
            if !is_file {
                return (Ok(()), Ok(()));
            }
            let parent = ino(&path);
            let attr = fs.lookup(parent, name.as_bytes()).unwrap();
            let file = fs.open_file(attr.ino).unwrap();
            let real = unit(fs.unlink(parent, name.as_bytes()));
            assert_eq!(fs.getattr(attr.ino).unwrap().nlink, attr.nlink - 1);
            fs.close_file(&file);
            fs.forget(attr.ino, 1);
            (real, model.unlink(dir, &name))
        }
        Op::Sync | Op::Remount | Op::PowerCut { .. } => (Ok(()), Ok(())),
    }
}

fn run(ops: &[Op], interval_ms: u64, cache: usize) {
    let mut mount = Mount::new(interval_ms, cache);
    let mut model = Model::new();
    let mut history = vec![model.clone()];
    let mut synced = 0;
    for op in ops {
        match op {
            Op::Sync => {
                mount.sync();
                synced = history.len() - 1;
            }
            Op::Remount => {
                mount.remount();
                synced = history.len() - 1;
            }
            Op::PowerCut { seed } => {
                mount.power_cut(*seed);
                let dump = mount.dump();
                let survived = history[synced..].iter().rposition(|m| m.dump() == dump);
                let Some(survived) = survived else {
                    panic!("not the result of a prefix with all synced operations: {dump:#?}");
                };
                model = history[synced + survived].clone();
                history = vec![model.clone()];
                synced = 0;
            }
            op => {
                let (real, modelled) = apply(op, &mount, &mut model);
                assert_eq!(real, modelled, "{op:?}");
                history.push(model.clone());
            }
        }
    }
    assert_eq!(mount.dump(), model.dump());
    mount.remount();
    assert_eq!(mount.dump(), model.dump());
    // Removed inodes leave nothing behind.
    let used = u64::try_from(
        model
            .dump()
            .values()
            .map(|r| &r.same_as)
            .collect::<std::collections::BTreeSet<_>>()
            .len(),
    )
    .unwrap();
    let stat = mount.fs().statfs().unwrap();
    assert_eq!(stat.files - stat.files_free, used);
}

proptest! {
    #[test]
    fn names_agree_with_the_model_over_remounts_and_power_cuts(
        ops in prop::collection::vec(op(), 1..80),
        commits_all_the_time in any::<bool>(),
        tiny_cache in any::<bool>(),
    ) {
        let interval_ms = if commits_all_the_time { 0 } else { 3_600_000 };
        run(&ops, interval_ms, if tiny_cache { 1 } else { 10_000 });
    }
}
